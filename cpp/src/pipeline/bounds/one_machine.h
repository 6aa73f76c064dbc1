// One machine that serves jobs with heads and tails. Private.

#pragma once

#include <limits>
#include <span>
#include <vector>

namespace megacore::pipeline {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Jobs of one kind, which are served in order. Job j cannot start before heads[j] and leaves
// tails[size - 1 - j] to do after its end; both lists ascend, so the first job has the longest
// tail. No tails: nothing is left.
struct JobClass {
  double duration;  // of each job
  std::span<const double> heads;
  std::span<const double> tails;

  double tail(size_t job) const { return tails.empty() ? 0.0 : tails[tails.size() - 1 - job]; }
};

// Earliest end of all jobs, without their tails: serve them in the order of their heads.
// O(jobs x classes).
double queue_makespan(std::span<const JobClass> classes);

// Earliest time by which all jobs and their tails are over when jobs may be interrupted: always
// serve the longest tail that is there. No schedule without interruption is faster.
// O(jobs x classes). Source: Jackson's preemptive schedule; Carlier, EJOR 11 (1982).
double delivery_makespan(std::span<const JobClass> classes);

}  // namespace megacore::pipeline
