// Layout of rows in peer memory: the arithmetic of an exchange by direct writes of the members of a
// group. Shared by the CPU (peer_exchange.h) and by CUDA kernels.
//
// The G members hold E experts in P equal parts; members that share a part hold the same experts.
// Every member has a receive buffer of `capacity` rows. The rows of a part are sorted by expert,
// then by sender, then in the sender's order. So from the counts of all members each one computes
// the row and buffer of each of its rows, and whether the row fits: rows at or after the capacity
// are not sent, which are those for the last experts of a part, and among these those of the last
// senders.
//
//   counts {{2, 1}, {1, 3}}, one part, capacity 6:
//   first rows {{0, 3}, {2, 4}}, kept {{2, 1}, {1, 2}}; the last row of sender 1 has no room
//
// A row of a peer is identified by one number, its address: member * capacity + row.
//
// Of the copies of a token that go to one member only the first travels. Its row is the source of
// the others, which the receiving member copies within its own memory. So a token crosses the link
// to a member once, however many experts it has there.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::moe {

struct PeerShape {
  int64_t num_members = 1;
  int64_t position = 0;  // of this member
  int64_t num_experts = 0;
  int64_t num_parts = 1;  // divides num_experts
  int64_t part = 0;       // which part this member holds
  int64_t capacity = 0;   // rows of every member's buffer

  MC_HOST_DEVICE int64_t num_local() const { return num_experts / num_parts; }
  // A member's message: its copies for every expert, and its capacity, which must be that of all.
  MC_HOST_DEVICE int64_t message_numel() const { return num_experts + 1; }
};

// Number of rows that fit in a buffer, of `count` rows from row `first` on.
MC_HOST_DEVICE int64_t kept_rows(int64_t capacity, int64_t first, int64_t count) {
  const int64_t room = capacity - first;
  return room <= 0 ? 0 : (room < count ? room : count);
}

// Copies for `expert` from the members before `end`. `messages` is (num_members, message_numel).
MC_HOST_DEVICE int64_t copies_before(const int64_t* messages,
                                     const PeerShape& shape,
                                     int64_t expert,
                                     int64_t end) {
  int64_t copies = 0;
  for (int64_t member = 0; member < end; ++member) {
    copies += messages[member * shape.message_numel() + expert];
  }
  return copies;
}

// The first member with another capacity, or -1.
MC_HOST_DEVICE int64_t member_of_other_capacity(const int64_t* messages, const PeerShape& shape) {
  for (int64_t member = 0; member < shape.num_members; ++member) {
    if (messages[member * shape.message_numel() + shape.num_experts] != shape.capacity) {
      return member;
    }
  }
  return -1;
}

// Plan of a member's rows.
struct PeerPlan {
  int64_t num_copies = 0;  // of this member's tokens, with those for no expert
  // (num_experts) what to add to a row sorted by expert to get its row in the buffer of a peer.
  int64_t* shift = nullptr;
  int64_t* kept = nullptr;      // (num_experts) rows of this member that have room
  int64_t* m_splits = nullptr;  // (num_local) rows that arrive here
  // (3) rows that arrive here; copies of this member that are not sent; those for lack of room
  int64_t* totals = nullptr;
};

// Numbers of rows or copies of one expert, or of several.
struct PlannedRows {
  int64_t wanted = 0;    // copies of this member
  int64_t kept = 0;      // of them those that have room
  int64_t arriving = 0;  // rows that arrive here

  MC_HOST_DEVICE void add(const PlannedRows& other) {
    wanted += other.wanted;
    kept += other.kept;
    arriving += other.arriving;
  }
};

// Writes the totals, from those of all experts.
MC_HOST_DEVICE void write_totals(const PlannedRows& all, const PeerPlan& plan) {
  plan.totals[0] = all.arriving;
  plan.totals[1] = plan.num_copies - all.kept;
  plan.totals[2] = all.wanted - all.kept;
}

// One expert's part of the plan. `first_of_expert` is the first row of its part's buffer,
// `first_sorted` that of this member's rows sorted by expert.
MC_HOST_DEVICE PlannedRows plan_expert(const int64_t* messages,
                                       const PeerShape& shape,
                                       int64_t expert,
                                       int64_t first_of_expert,
                                       int64_t first_sorted,
                                       const PeerPlan& plan) {
  PlannedRows rows;
  int64_t arriving = 0;
  int64_t first = first_of_expert;
  for (int64_t member = 0; member < shape.num_members; ++member) {
    const int64_t count = messages[member * shape.message_numel() + expert];
    const int64_t kept = kept_rows(shape.capacity, first, count);
    if (member == shape.position) {
      plan.shift[expert] = first - first_sorted;
      plan.kept[expert] = kept;
      rows.wanted = count;
      rows.kept = kept;
    }
    arriving += kept;
    first += count;
  }
  if (expert / shape.num_local() == shape.part) {
    plan.m_splits[expert % shape.num_local()] = arriving;
    rows.arriving = arriving;
  }
  return rows;
}

// ---- map of copies ------------------------------------------------------------------------------

// Entry of a map: -1 for a copy that is not sent, the address of its row for one that travels, and
// -2 - address for one whose row is copied from that of an earlier copy on the same member.
MC_HOST_DEVICE int64_t entry_beside(int64_t address) { return -2 - address; }
MC_HOST_DEVICE int64_t address_of(int64_t entry) { return entry < -1 ? -2 - entry : entry; }

// The row from which that of copy `copy` of a token is copied: its own, if it travels. `entries`
// are those of the token's copies.
MC_HOST_DEVICE int64_t source_row(const int64_t* entries, int64_t copy, int64_t capacity) {
  const int64_t address = address_of(entries[copy]);
  for (int64_t other = 0; entries[copy] < -1 && other < copy; ++other) {
    if (entries[other] >= 0 && entries[other] / capacity == address / capacity) {
      return entries[other] % capacity;
    }
  }
  return address % capacity;
}

// Where the copies of tokens go.
struct PeerRouting {
  const int64_t* experts = nullptr;  // (num_tokens, num_choices); outside of the experts: not sent
  const int64_t* sorted = nullptr;   // (num_tokens, num_choices) row of each copy sorted by expert
  const int64_t* shift = nullptr;    // (num_experts) of the plan
  const int64_t* members = nullptr;  // (num_parts, repeats) members that hold each part
  int64_t num_tokens = 0;
  int64_t num_choices = 0;
  int64_t num_experts = 0;
  int64_t num_parts = 1;
  int64_t repeats = 1;
  int64_t capacity = 0;
};

// Writes the entries of a token's copies, (num_choices, repeats).
MC_HOST_DEVICE void map_token(const PeerRouting& routing, int64_t token, int64_t* map) {
  const int64_t copies = routing.num_choices * routing.repeats;
  int64_t* const entries = map + token * copies;
  for (int64_t copy = 0; copy < copies; ++copy) {
    const int64_t choice = token * routing.num_choices + copy / routing.repeats;
    const int64_t expert = routing.experts[choice];
    entries[copy] = -1;
    if (expert < 0 || expert >= routing.num_experts) {
      continue;
    }
    const int64_t row = routing.sorted[choice] + routing.shift[expert];
    if (row < 0 || row >= routing.capacity) {
      continue;
    }
    const int64_t part = expert / (routing.num_experts / routing.num_parts);
    const int64_t member = routing.members[part * routing.repeats + copy % routing.repeats];
    const int64_t address = member * routing.capacity + row;
    bool travels = true;
    for (int64_t other = 0; other < copy; ++other) {
      travels = travels && (entries[other] < 0 || entries[other] / routing.capacity != member);
    }
    entries[copy] = travels ? address : entry_beside(address);
  }
}

// ---- memory -------------------------------------------------------------------------------------

// Exchanges of rows that can be in flight at a time. Each has a slot of every member's memory.
inline constexpr int64_t kPeerSlots = 2;

// Flags come in one set per slot and one for the messages.
inline constexpr int64_t kPeerFlagSets = kPeerSlots + 1;
inline constexpr int64_t kMessageFlags = kPeerSlots;

// Rows are aligned to this many bytes.
inline constexpr int64_t kPeerAlignment = 256;

MC_HOST_DEVICE int64_t peer_aligned(int64_t bytes) {
  return (bytes + kPeerAlignment - 1) / kPeerAlignment * kPeerAlignment;
}

// Flags at the start of memory without a window (on GPUs): for each set, first the offered, then
// the taken flags, one of each member, written by that member.
MC_HOST_DEVICE int64_t peer_flag(int64_t num_members, int64_t set, bool is_taken, int64_t member) {
  return (2 * set + (is_taken ? 1 : 0)) * num_members + member;
}
MC_HOST_DEVICE int64_t peer_flags_bytes(int64_t num_members) {
  return peer_aligned(peer_flag(num_members, kPeerFlagSets, false, 0) *
                      static_cast<int64_t>(sizeof(uint32_t)));
}

// Layout of every member's memory: messages, then slots. Equal on all members. An exchange may have
// fewer experts, and fewer or shorter rows.
struct PeerLayout {
  int64_t num_members = 1;
  int64_t max_experts = 0;
  int64_t max_capacity = 0;
  int64_t max_row_bytes = 0;

  MC_HOST_DEVICE int64_t messages_bytes() const {
    return peer_aligned(num_members * (max_experts + 1) * static_cast<int64_t>(sizeof(int64_t)));
  }
  MC_HOST_DEVICE int64_t probs_bytes() const {
    return peer_aligned(max_capacity * static_cast<int64_t>(sizeof(float)));
  }
  MC_HOST_DEVICE int64_t sources_bytes() const {
    return peer_aligned(max_capacity * static_cast<int64_t>(sizeof(uint32_t)));
  }
  MC_HOST_DEVICE int64_t slot_bytes() const {
    return probs_bytes() + sources_bytes() + peer_aligned(max_capacity * max_row_bytes);
  }
  MC_HOST_DEVICE int64_t bytes() const { return messages_bytes() + kPeerSlots * slot_bytes(); }
  MC_HOST_DEVICE int64_t probs_offset(int64_t slot) const {
    return messages_bytes() + slot * slot_bytes();
  }
  MC_HOST_DEVICE int64_t sources_offset(int64_t slot) const {
    return probs_offset(slot) + probs_bytes();
  }
  MC_HOST_DEVICE int64_t rows_offset(int64_t slot) const {
    return sources_offset(slot) + sources_bytes();
  }
};

}  // namespace megacore::moe
