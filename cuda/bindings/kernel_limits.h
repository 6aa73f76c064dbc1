// Sizes that kernels take at most, by their names in Python.

#pragma once

#include <cstdint>
#include <utility>

#include "megacore/cuda/dense.h"
#include "megacore/cuda/peer_exchange.h"
#include "megacore/cuda/permutation.h"
#include "megacore/cuda/router.h"
#include "megacore/cuda/topk.h"

namespace megacore::cuda {

inline constexpr std::pair<const char*, int64_t> kLimits[] = {
    {"MAX_NORM_BYTES", kMaxNormPacks * 16},
    {"MAX_NORMED_HEAD_BYTES", kMaxNormedHeadBytes},
    {"MAX_ROUTER_EXPERTS", kMaxRouterExperts},
    {"MAX_ROUTER_CHOICES", kMaxRouterChoices},
    {"MAX_SORTED_EXPERTS", kMaxSortedExperts},
    {"MAX_TOP_K_COLUMNS", kMaxTopKColumns},
    {"PEER_STATE_NUMEL", (sizeof(PeerState) + sizeof(int64_t) - 1) / sizeof(int64_t)},
};

}  // namespace megacore::cuda
