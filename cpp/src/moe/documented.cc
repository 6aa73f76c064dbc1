#include "megacore/moe/documented.h"

#include <algorithm>
#include <numeric>

#include "megacore/base/check.h"

namespace megacore::moe {
namespace {

// Indices that sort `values` descending; equal values keep their order.
std::vector<int64_t> descending(std::span<const int64_t> values) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

std::vector<int64_t> gather(std::span<const int64_t> values, const std::vector<int64_t>& order) {
  std::vector<int64_t> gathered;
  gathered.reserve(order.size());
  for (const int64_t index : order) {
    gathered.push_back(values[static_cast<size_t>(index)]);
  }
  return gathered;
}

}  // namespace

int64_t floor_average(std::span<const int64_t> rank_loads) {
  MC_REQUIRE(!rank_loads.empty(), "the average of no ranks is not defined");
  return std::accumulate(rank_loads.begin(), rank_loads.end(), int64_t{0}) /
         static_cast<int64_t>(rank_loads.size());
}

std::vector<int64_t> spare_capacity(std::span<const int64_t> rank_loads, int64_t average) {
  std::vector<int64_t> spare;
  spare.reserve(rank_loads.size());
  for (const int64_t load : rank_loads) {
    spare.push_back(larger(0, average - load));
  }
  return spare;
}

std::vector<int64_t> spillover(std::span<const int64_t> expert_loads,
                               int64_t num_ranks,
                               int64_t average) {
  MC_REQUIRE(num_ranks >= 1 && static_cast<int64_t>(expert_loads.size()) % num_ranks == 0,
             expert_loads.size(),
             " experts do not divide over ",
             num_ranks,
             " ranks");
  const size_t experts_per_rank = expert_loads.size() / static_cast<size_t>(num_ranks);
  std::vector<int64_t> spilled(expert_loads.size(), 0);
  std::vector<size_t> order(experts_per_rank);
  for (size_t first = 0; first < expert_loads.size(); first += experts_per_rank) {
    std::iota(order.begin(), order.end(), first);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return expert_loads[a] < expert_loads[b];
    });
    int64_t sum = 0;
    for (const size_t expert : order) {
      const int64_t before = larger(0, sum - average);
      sum += expert_loads[expert];
      spilled[expert] = larger(0, sum - average) - before;
    }
  }
  return spilled;
}

std::vector<Piece> interval_overlap(std::span<const int64_t> chunks,
                                    std::span<const int64_t> buckets) {
  std::vector<Piece> pieces;
  pieces.reserve(chunks.size() + buckets.size());
  size_t chunk = 0;
  size_t bucket = 0;
  Interval chunk_line{0, chunks.empty() ? 0 : chunks[0]};
  Interval bucket_line{0, buckets.empty() ? 0 : buckets[0]};
  while (chunk < chunks.size() && bucket < buckets.size()) {
    if (const int64_t tokens = overlap(chunk_line, bucket_line); tokens > 0) {
      pieces.push_back({static_cast<int64_t>(chunk), static_cast<int64_t>(bucket), tokens});
    }
    if (chunk_line.end <= bucket_line.end) {
      ++chunk;
      chunk_line = {chunk_line.end, chunk_line.end + (chunk < chunks.size() ? chunks[chunk] : 0)};
    } else {
      ++bucket;
      bucket_line = {bucket_line.end,
                     bucket_line.end + (bucket < buckets.size() ? buckets[bucket] : 0)};
    }
  }
  return pieces;
}

std::vector<Piece> assign_spillover(std::span<const int64_t> spillover,
                                    std::span<const int64_t> spare_capacity) {
  const std::vector<int64_t> experts = descending(spillover);
  const std::vector<int64_t> ranks = descending(spare_capacity);
  std::vector<Piece> pieces =
      interval_overlap(gather(spillover, experts), gather(spare_capacity, ranks));
  for (Piece& piece : pieces) {
    piece.chunk = experts[static_cast<size_t>(piece.chunk)];
    piece.bucket = ranks[static_cast<size_t>(piece.bucket)];
  }
  return pieces;
}

std::vector<Clone> top_pieces(const std::vector<Piece>& pieces, int64_t num_spare_slots) {
  std::vector<Piece> sorted = pieces;
  std::sort(sorted.begin(), sorted.end(), [](const Piece& a, const Piece& b) {
    if (a.bucket != b.bucket) {
      return a.bucket < b.bucket;
    }
    return a.tokens != b.tokens ? a.tokens > b.tokens : a.chunk < b.chunk;
  });
  std::vector<Clone> clones;
  int64_t slot = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    slot = i > 0 && sorted[i].bucket == sorted[i - 1].bucket ? slot + 1 : 0;
    if (slot < num_spare_slots) {
      clones.push_back({sorted[i].chunk, sorted[i].bucket, slot, sorted[i].tokens});
    }
  }
  return clones;
}

std::vector<Clone> plan_documented(const Loads& loads, int64_t num_spare_slots) {
  const int64_t average = floor_average(loads.ranks);
  const auto num_ranks = static_cast<int64_t>(loads.ranks.size());
  return top_pieces(assign_spillover(spillover(loads.experts, num_ranks, average),
                                     spare_capacity(loads.ranks, average)),
                    num_spare_slots);
}

}  // namespace megacore::moe
