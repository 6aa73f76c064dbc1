// Two views of one world of ranks (parallel folding).
//
// Attention and dense layers divide the world as tp x cp x dp x pp, expert layers divide the same
// ranks as etp x ep x edp x pp, both in one axis order. The views are independent except for the
// pipeline: the dense and expert parts of a layer are on the same stage, so both views must have
// the same pipeline groups.
//
//   const Topology world = make_topology({.world_size = 16, .tp = 4, .pp = 2, .ep = 4, .etp = 1});
//   world.dp;                       // 2 = 16 / (4 x 1 x 2)
//   world.expert_dp;                // 2 = 16 / (1 x 4 x 2)
//   world.expert.groups("ep");      // {0,1,2,3} {4,5,6,7} {8,9,10,11} {12,13,14,15}

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "megacore/parallel/rank_generator.h"

namespace megacore::parallel {

struct TopologyConfig {
  int64_t world_size = 1;
  int64_t tp = 1;  // tensor parallel ranks of dense layers
  int64_t cp = 1;  // context parallel ranks
  int64_t pp = 1;  // pipeline ranks
  int64_t ep = 1;  // expert parallel ranks
  // Tensor parallel ranks of expert layers; tp when not given.
  std::optional<int64_t> etp = std::nullopt;
  std::string order{kDefaultOrder};

  friend bool operator==(const TopologyConfig&, const TopologyConfig&) = default;
};

struct Topology {
  TopologyConfig config;
  int64_t dp;            // world_size / (tp x cp x pp)
  int64_t etp;           // config.etp, or tp
  int64_t expert_dp;     // world_size / (etp x ep x pp)
  RankGenerator dense;   // axes tp, cp, dp, pp
  RankGenerator expert;  // axes etp, ep, edp, pp

  friend bool operator==(const Topology&, const Topology&) = default;
};

// Checks the configuration and builds both views.
// REQUIRES: all sizes >= 1; world_size divisible by tp x cp x pp and by etp x ep x pp; an order
// that parses and has every axis larger than 1; equal pipeline groups in both views. An exception
// shows the product with each factor and the nearest legal settings.
Topology make_topology(const TopologyConfig& config);

}  // namespace megacore::parallel
