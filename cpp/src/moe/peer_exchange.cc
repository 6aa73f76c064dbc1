#include "megacore/moe/peer_exchange.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/low_precision.h"
#include "megacore/moe/permutation.h"

namespace megacore::moe {
namespace {

using parallel::HostDtype;

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

// The row of a copy in the memory of a member.
struct Place {
  int64_t member;
  int64_t row;
};
Place place_of(int64_t entry, int64_t capacity) {
  const int64_t address = address_of(entry);
  return {address / capacity, address % capacity};
}

template <typename Type>
void add_row(const std::byte* from, std::vector<typename Type::Wide>& sums) {
  const auto* __restrict__ values = reinterpret_cast<const typename Type::Stored*>(from);
  const auto width = static_cast<int64_t>(sums.size());
  typename Type::Wide* __restrict__ to = sums.data();
  for (int64_t i = 0; i < width; ++i) {
    to[i] += Type::widen(values[i]);
  }
}

// Calls row_at(copy), which gives null for a copy that was not sent, in the order of the copies.
template <typename Type, typename RowAt>
void sum_copies(const PeerRows& tokens, const PeerMap& map, const RowAt& row_at) {
  const int64_t copies = map.num_choices * map.repeats;
  std::vector<typename Type::Wide> sums(static_cast<size_t>(tokens.width));
  auto* to = reinterpret_cast<typename Type::Stored*>(tokens.rows);
  for (int64_t token = 0; token < map.num_tokens; ++token, to += tokens.width) {
    std::fill(sums.begin(), sums.end(), typename Type::Wide{0});
    for (int64_t copy = token * copies; copy < (token + 1) * copies; ++copy) {
      if (const std::byte* row = row_at(copy)) {
        add_row<Type>(row, sums);
      }
    }
    for (int64_t i = 0; i < tokens.width; ++i) {
      to[i] = Type::narrow(sums[static_cast<size_t>(i)]);
    }
  }
}

template <typename Body>
void with_type(HostDtype dtype, const Body& body) {
  switch (dtype) {
    case HostDtype::kFloat32:
      return body(base::Plain<float>{});
    case HostDtype::kFloat64:
      return body(base::Plain<double>{});
    case HostDtype::kBFloat16:
      return body(base::BFloat16{});
    case HostDtype::kFloat16:
      return body(base::Float16{});
    default:
      MC_REQUIRE(false, "rows of {} cannot be added up here", parallel::name_of(dtype));
  }
}

}  // namespace

void map_copies(const PeerRouting& routing, int64_t* map) {
  MC_REQUIRE(routing.num_tokens >= 0 && routing.num_choices >= 0 && routing.repeats >= 1 &&
                 routing.capacity >= 0,
             "a size of the map is negative");
  MC_REQUIRE(routing.num_parts >= 1 && routing.num_experts % routing.num_parts == 0,
             "{} experts do not divide into {} parts", routing.num_experts, routing.num_parts);
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    map_token(routing, token, map);
  }
}

PeerExchange::PeerExchange(parallel::HostWindow& window, const PeerLayout& layout)
    : window_(window), layout_(layout) {
  MC_REQUIRE(window.num_parts() == kWindowParts && window.bytes() >= layout.bytes() &&
                 window.size() == layout.num_members,
             "a window of {} parts, {} bytes and {} members does not fit an exchange of {} "
             "members, which needs {} parts and {} bytes",
             window.num_parts(), window.bytes(), window.size(), layout.num_members, kWindowParts,
             layout.bytes());
  MC_REQUIRE(layout.max_capacity < int64_t{1} << 32, "{} rows are more than 32 bits count",
             layout.max_capacity);
}

uint32_t* PeerExchange::sources(int64_t slot, int64_t member) const {
  return reinterpret_cast<uint32_t*>(window_.data(static_cast<int>(member)) +
                                     layout_.sources_offset(slot));
}

int64_t* PeerExchange::messages(int64_t member) const {
  return reinterpret_cast<int64_t*>(window_.data(static_cast<int>(member)));
}

std::byte* PeerExchange::rows(int64_t slot, int64_t member) const {
  return window_.data(static_cast<int>(member)) + layout_.rows_offset(slot);
}

float* PeerExchange::probs(int64_t slot, int64_t member) const {
  return reinterpret_cast<float*>(window_.data(static_cast<int>(member)) +
                                  layout_.probs_offset(slot));
}

void PeerExchange::check_slot(int64_t slot) {
  MC_REQUIRE(slot >= 0 && slot < kPeerSlots, "slot is {}; there are {}", slot, kPeerSlots);
}

void PeerExchange::check_rows(int64_t slot, const PeerRows& rows, int64_t num_rows) const {
  check_slot(slot);
  MC_REQUIRE(rows.width >= 0 && num_rows >= 0 && num_rows <= layout_.max_capacity &&
                 rows.row_bytes() <= layout_.max_row_bytes,
             "{} rows of {} bytes do not fit buffers of {} rows of {} bytes", num_rows,
             rows.row_bytes(), layout_.max_capacity, layout_.max_row_bytes);
}

void PeerExchange::check_map(const PeerMap& map) const {
  MC_REQUIRE(map.num_tokens >= 0 && map.num_choices >= 0 && map.repeats >= 1,
             "a size of the map is negative");
  const int64_t end = layout_.num_members * map.capacity;
  for (int64_t i = 0; i < map.num_tokens * map.num_choices * map.repeats; ++i) {
    MC_REQUIRE(address_of(map.rows[i]) < end,
               "row {} of copy {} is not among the {} rows of all members; use -1 for a copy that "
               "is not sent",
               address_of(map.rows[i]), i, end);
  }
}

void PeerExchange::plan_copies(const PeerShape& shape,
                               const PeerRouting& routing,
                               const PeerPlan& plan,
                               int64_t* map) {
  const int64_t numel = routing.num_tokens * routing.num_choices;
  std::vector<int64_t> sorted(static_cast<size_t>(numel));
  std::vector<int64_t> counts(static_cast<size_t>(shape.num_experts));
  sort_by_expert(routing.experts, numel, shape.num_experts, sorted.data(), counts.data());
  send_counts(counts.data(), shape);
  this->plan(shape, plan);
  PeerRouting planned = routing;
  planned.sorted = sorted.data();
  planned.shift = plan.shift;
  map_copies(planned, map);
}

void PeerExchange::send_counts(const int64_t* counts, const PeerShape& shape) {
  MC_REQUIRE(shape.num_experts <= layout_.max_experts && shape.num_members == window_.size() &&
                 shape.num_parts >= 1 && shape.num_experts % shape.num_parts == 0,
             "{} experts in {} parts do not fit an exchange made for {} experts and {} members",
             shape.num_experts, shape.num_parts, layout_.max_experts, window_.size());
  window_.wait_until_taken(kMessageFlags);
  const int64_t numel = shape.message_numel();
  for (int64_t member = 0; member < shape.num_members; ++member) {
    int64_t* const message = messages(member) + shape.position * numel;
    copy_bytes(message, counts, shape.num_experts * static_cast<int64_t>(sizeof(int64_t)));
    message[shape.num_experts] = shape.capacity;
  }
  window_.offer(kMessageFlags);
}

void PeerExchange::plan(const PeerShape& shape, const PeerPlan& plan) {
  window_.wait_until_offered(kMessageFlags);
  const int64_t* const all = messages(shape.position);
  const int64_t* const mine = all + shape.position * shape.message_numel();
  const int64_t other = member_of_other_capacity(all, shape);
  const int64_t capacity = other < 0 ? 0 : all[other * shape.message_numel() + shape.num_experts];
  PlannedRows rows;
  int64_t first_of_expert = 0;
  int64_t first_sorted = 0;
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    first_of_expert = expert % shape.num_local() == 0 ? 0 : first_of_expert;
    rows.add(plan_expert(all, shape, expert, first_of_expert, first_sorted, plan));
    first_of_expert += copies_before(all, shape, expert, shape.num_members);
    first_sorted += mine[expert];
  }
  write_totals(rows, plan);
  window_.take(kMessageFlags);
  MC_REQUIRE(other < 0,
             "rank {} keeps {} rows for its experts, but rank {} {}; all need equally many tokens "
             "and one budget",
             window_.ranks()[static_cast<size_t>(std::max(other, int64_t{0}))], capacity,
             window_.ranks()[static_cast<size_t>(shape.position)], shape.capacity);
}

void PeerExchange::start_push(int64_t slot, const PeerRows& tokens, const PeerMap& map) {
  check_rows(slot, tokens, map.capacity);
  check_map(map);
  window_.wait_until_taken(slot);
  const int64_t bytes = tokens.row_bytes();
  const int64_t copies = map.num_choices * map.repeats;
  for (int64_t i = 0; i < map.num_tokens * copies; ++i) {
    if (map.rows[i] == -1) {
      continue;
    }
    const Place place = place_of(map.rows[i], map.capacity);
    if (map.rows[i] >= 0) {
      copy_bytes(rows(slot, place.member) + place.row * bytes, tokens.rows + i / copies * bytes,
                 bytes);
    }
    const int64_t source = source_row(map.rows + i / copies * copies, i % copies, map.capacity);
    sources(slot, place.member)[place.row] = static_cast<uint32_t>(source);
    if (tokens.probs != nullptr) {
      probs(slot, place.member)[place.row] = tokens.probs[i / map.repeats];
    }
  }
  window_.offer(slot);
}

void PeerExchange::finish_push(int64_t slot,
                               const PeerRows& to,
                               int64_t num_arrived,
                               int64_t capacity) {
  check_rows(slot, to, capacity);
  MC_REQUIRE(num_arrived >= 0 && num_arrived <= capacity, "{} rows arrive in a buffer of {}",
             num_arrived, capacity);
  window_.wait_until_offered(slot);
  const int64_t me = window_.position();
  const int64_t bytes = to.row_bytes();
  const uint32_t* const source_of = sources(slot, me);
  for (int64_t row = 0; row < num_arrived; ++row) {
    copy_bytes(to.rows + row * bytes, rows(slot, me) + source_of[row] * bytes, bytes);
  }
  if (to.probs != nullptr) {
    copy_bytes(to.probs, probs(slot, me), num_arrived * static_cast<int64_t>(sizeof(float)));
  }
  window_.take(slot);
}

std::byte* PeerExchange::reserve_pull(int64_t slot) {
  check_slot(slot);
  window_.wait_until_taken(slot);
  return rows(slot, window_.position());
}

void PeerExchange::start_pull(int64_t slot, const PeerRows& from, int64_t num_rows) {
  check_rows(slot, from, num_rows);
  std::byte* const to = reserve_pull(slot);
  const int64_t me = window_.position();
  if (from.rows != nullptr) {
    copy_bytes(to, from.rows, num_rows * from.row_bytes());
  }
  if (from.probs != nullptr) {
    copy_bytes(probs(slot, me), from.probs, num_rows * static_cast<int64_t>(sizeof(float)));
  }
  window_.offer(slot);
}

void PeerExchange::finish_pull(int64_t slot, const PeerRows& tokens, const PeerMap& map) {
  check_rows(slot, tokens, map.capacity);
  check_map(map);
  window_.wait_until_offered(slot);
  const int64_t bytes = tokens.row_bytes();
  with_type(tokens.dtype, [&]<typename Type>(Type) {
    sum_copies<Type>(tokens, map, [&](int64_t copy) -> const std::byte* {
      if (map.rows[copy] == -1) {
        return nullptr;
      }
      const Place place = place_of(map.rows[copy], map.capacity);
      return rows(slot, place.member) + place.row * bytes;
    });
  });
  if (tokens.probs != nullptr) {
    for (int64_t choice = 0; choice < map.num_tokens * map.num_choices; ++choice) {
      float sum = 0.0F;
      for (int64_t i = choice * map.repeats; i < (choice + 1) * map.repeats; ++i) {
        if (map.rows[i] != -1) {
          const Place place = place_of(map.rows[i], map.capacity);
          sum += probs(slot, place.member)[place.row];
        }
      }
      tokens.probs[choice] = sum;
    }
  }
  window_.take(slot);
}

}  // namespace megacore::moe
