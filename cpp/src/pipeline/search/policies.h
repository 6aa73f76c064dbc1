// Rules for the list scheduler. Private.
//
// Idea. One microbatch runs through all stages without waiting (a wave), and microbatch j is due j
// periods later: the key of an action of stage s and microbatch j is t(s) + j T. With F, B, W and
// hop the durations of a stage and of its message, and `stretch` extra time for each hop,
//
//   forward   t_F(s) = t_F(s - 1) + F(s - 1) + hop(s) + stretch
//   backward  t_B(s) = t_B(s + 1) + B(s + 1) + hop(s + 1) + stretch,   t_B(last) = t_F(last) +
//   F(last) life      l(s) = t_B(s) + B(s) + W(s) - t_F(s)               how long an activation is
//   held period    T = max over ranks of max(work of a microbatch, sum of size(s) l(s) / memory
//   limit)
//
// Variants: F only when no B can run (deepest stage or oldest microbatch first), waits of 0, two
// messages or one F, caps on the activations of a stage (the memory of a rank shared in proportion
// to l(s)), W at once or in gaps. With a fused backward also modulo scheduling: the wave takes the
// first free place in the period of each rank, so that all ranks can repeat it without a gap.
// Source: modulo scheduling, Rau, MICRO-27 (1994).

#pragma once

#include <vector>

#include "search/list_scheduler.h"

namespace megacore::pipeline {

// Rules that have proved themselves on different kinds of instances; most useful first.
std::vector<Policy> standard_policies(const Instance& instance);

}  // namespace megacore::pipeline
