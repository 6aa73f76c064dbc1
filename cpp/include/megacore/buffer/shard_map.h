// Ownership of parameter elements by data-parallel ranks (ZeRO stage 1).
//
// Rank r of dp_size owns the r-th slice of every bucket; slices ignore parameter borders, so a
// parameter can be split anywhere and a rank may own only padding. The rank's slices, concatenated
// in bucket order, are its shard, with "local" coordinates.
//
// Each element has four coordinates. With 3 + 5 + ... parameters on 4 ranks of 4 elements:
//
//   world   0 1 2 3 | 4 5 6 7 | 8 ...        rank 0 owns [3, 4) of parameter b: local [3, 4),
//   param   a a a b | b b b b | c ...        param [0, 1); rank 1 owns [4, 8): local [0, 4),
//   rank    0 0 0 0 | 1 1 1 1 | 2 ...        param [1, 5).

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megacore/buffer/bucket_plan.h"

namespace megacore::buffer {

// A run of elements of one parameter that one rank owns. All four ranges have the same length > 0.
struct ShardPiece {
  int64_t param_index = 0;
  int64_t bucket = 0;       // index into BufferPlan::buckets
  Range world = {};         // in the whole buffer
  Range bucket_range = {};  // from the start of the bucket
  Range local = {};         // in the rank's shard
  Range param = {};         // in the flattened parameter

  friend bool operator==(const ShardPiece&, const ShardPiece&) = default;
};

// The slice of bucket `bucket` that `dp_rank` owns, in buffer coordinates.
// Throws std::out_of_range for a bucket or rank that does not exist.
Range shard_range(const BufferPlan& plan, int64_t bucket, int64_t dp_rank);

// All pieces that `dp_rank` owns, in buffer order; padding belongs to no piece. Over all ranks
// every element of every parameter is in exactly one piece. O(buckets * log(parameters) + pieces).
// Throws std::out_of_range for a rank outside [0, dp_size).
std::vector<ShardPiece> shard_pieces(const BufferPlan& plan, int64_t dp_rank);

// One line per piece with its four ranges.
std::string to_text(const BufferPlan& plan, int64_t dp_rank);

}  // namespace megacore::buffer
