// Local improvement of many solutions, most of it for the best ones. Private.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "search/instance.h"

namespace megacore::pipeline {

struct Solution {
  Orders orders;
  double makespan;
  std::string winner;  // the method that found it
};

struct ContestResult {
  Solution best;
  int64_t num_scheduled;
};

// Solutions for a contest: the best ones, each once.
class Contestants {
 public:
  void add(const Solution& solution);
  bool empty() const { return solutions_.empty(); }
  // The best first; of those as good as each other, the one that came first.
  std::vector<Solution> take() &&;

 private:
  void shrink();

  std::vector<Solution> solutions_;
};

struct Contest {
  double target;        // a makespan at which to stop
  int64_t max_actions;  // to time
};

// Improves all of them a little, the best quarter of the result a little more, and so on: each
// round has the same effort. Source: successive halving, Karnin, Koren and Somekh, ICML 2013.
// REQUIRES: there is one.
ContestResult improve_best(OrderTimer& timer,
                           const Instance& instance,
                           std::vector<Solution> solutions,
                           const Contest& contest);

}  // namespace megacore::pipeline
