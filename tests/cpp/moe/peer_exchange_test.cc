#include "megacore/moe/peer_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "megacore/moe/permutation.h"
#include "megacore/parallel/epochs.h"

namespace megacore::moe {
namespace {

using parallel::HostCommConfig;
using parallel::HostSegment;
using parallel::HostWindow;

using Counts = std::vector<std::vector<int64_t>>;  // by sender, by expert

struct Group {
  int64_t num_members = 2;
  int64_t num_experts = 4;
  int64_t num_parts = 2;  // num_members / num_parts members share each part
  int64_t capacity = 8;

  PeerShape shape(int64_t position) const {
    return {.num_members = num_members,
            .position = position,
            .num_experts = num_experts,
            .num_parts = num_parts,
            .part = position % num_parts,
            .capacity = capacity};
  }
};

// The row of every copy, by sender and by place in the sender's order by expert; -1: no room. What
// peer_rows.h computes, done with a list of all copies.
std::vector<std::vector<int64_t>> rows_by_list(const Group& group, const Counts& counts) {
  std::vector<std::vector<int64_t>> rows(counts.size());
  std::vector<int64_t> sorted(counts.size());
  for (size_t sender = 0; sender < counts.size(); ++sender) {
    for (const int64_t count : counts[sender]) {
      rows[sender].resize(rows[sender].size() + static_cast<size_t>(count));
    }
  }
  int64_t next = 0;
  for (int64_t expert = 0; expert < group.num_experts; ++expert) {
    if (expert % (group.num_experts / group.num_parts) == 0) {
      next = 0;
    }
    for (size_t sender = 0; sender < counts.size(); ++sender) {
      for (int64_t i = 0; i < counts[sender][static_cast<size_t>(expert)]; ++i, ++next) {
        rows[sender][static_cast<size_t>(sorted[sender]++)] = next < group.capacity ? next : -1;
      }
    }
  }
  return rows;
}

struct Plan {
  std::vector<int64_t> shift;
  std::vector<int64_t> kept;
  std::vector<int64_t> m_splits;
  std::vector<int64_t> totals;

  explicit Plan(const Group& group)
      : shift(static_cast<size_t>(group.num_experts), -7),
        kept(static_cast<size_t>(group.num_experts), -7),
        m_splits(static_cast<size_t>(group.num_experts / group.num_parts), -7),
        totals(3, -7) {}
  PeerPlan pointers(int64_t num_copies = 0) {
    return {.num_copies = num_copies,
            .shift = shift.data(),
            .kept = kept.data(),
            .m_splits = m_splits.data(),
            .totals = totals.data()};
  }
};

// Runs `member` in one thread per position; returns what each threw, or "".
std::vector<std::string> run_members(const PeerLayout& layout,
                                     const std::function<void(PeerExchange&, int64_t)>& member,
                                     double timeout_s = 60.0) {
  const auto size = static_cast<size_t>(layout.num_members);
  const int64_t bytes = HostWindow::segment_bytes(layout.bytes(), PeerExchange::kWindowParts);
  std::vector<std::vector<std::byte>> memory(size);
  std::vector<std::byte*> starts;
  HostCommConfig config;
  config.timeout_s = timeout_s;
  for (size_t p = 0; p < size; ++p) {
    memory[p].resize(static_cast<size_t>(bytes) + 64);
    const auto address = reinterpret_cast<uintptr_t>(memory[p].data());
    starts.push_back(memory[p].data() + (64 - address % 64) % 64);
    config.ranks.push_back(10 + static_cast<int>(p));
  }
  std::vector<std::unique_ptr<HostWindow>> windows;
  for (size_t p = 0; p < size; ++p) {
    std::vector<HostSegment> segments;
    for (std::byte* start : starts) {
      segments.push_back(HostSegment::over(start, bytes));
    }
    config.position = static_cast<int>(p);
    windows.push_back(
        std::make_unique<HostWindow>(std::move(segments), PeerExchange::kWindowParts, config));
  }
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (size_t p = 0; p < size; ++p) {
    threads.emplace_back([&, p] {
      try {
        PeerExchange peers(*windows[p], layout);
        member(peers, static_cast<int64_t>(p));
      } catch (const std::exception& error) {
        errors[p] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

Counts random_counts(const Group& group, std::mt19937& random) {
  Counts counts;
  for (int64_t sender = 0; sender < group.num_members; ++sender) {
    counts.emplace_back();
    for (int64_t expert = 0; expert < group.num_experts; ++expert) {
      counts.back().push_back(random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 5));
    }
  }
  return counts;
}

PeerLayout layout_of(const Group& group, int64_t row_bytes) {
  return {.num_members = group.num_members,
          .max_experts = group.num_experts,
          .max_capacity = group.capacity,
          .max_row_bytes = row_bytes};
}

TEST(PeerRows, KeepsWhatFits) {
  EXPECT_EQ(kept_rows(6, 0, 4), 4);
  EXPECT_EQ(kept_rows(6, 4, 4), 2);
  EXPECT_EQ(kept_rows(6, 6, 4), 0);
  EXPECT_EQ(kept_rows(6, 9, 4), 0);
  EXPECT_EQ(kept_rows(0, 0, 0), 0);
}

TEST(PeerExchange, PlansAreThoseOfAListOfAllCopies) {
  std::mt19937 random(3);
  const std::vector<Group> groups = {{.num_members = 2},
                                     {.num_members = 3, .num_experts = 6, .num_parts = 3},
                                     {.num_members = 4, .num_experts = 6, .num_parts = 2},
                                     {.num_members = 2, .num_experts = 5, .num_parts = 1}};
  for (Group group : groups) {
    std::vector<Counts> rounds;
    for (int round = 0; round < 40; ++round) {
      rounds.push_back(random_counts(group, random));
    }
    for (const int64_t capacity : {0, 1, 7, 100}) {
      SCOPED_TRACE(::testing::Message() << group.num_members << " members, capacity " << capacity);
      group.capacity = capacity;
      const auto errors = run_members(layout_of(group, 4), [&](PeerExchange& peers, int64_t me) {
        for (const Counts& counts : rounds) {
          const auto position = static_cast<size_t>(me);
          const std::vector<std::vector<int64_t>> rows = rows_by_list(group, counts);
          Plan plan(group);
          peers.send_counts(counts[position].data(), group.shape(me));
          peers.plan(group.shape(me), plan.pointers(1000));
          int64_t sorted = 0;
          int64_t num_kept = 0;
          for (int64_t expert = 0; expert < group.num_experts; ++expert) {
            int64_t kept = 0;
            for (int64_t i = 0; i < counts[position][static_cast<size_t>(expert)]; ++i, ++sorted) {
              const int64_t row = sorted + plan.shift[static_cast<size_t>(expert)];
              const int64_t expected = rows[position][static_cast<size_t>(sorted)];
              EXPECT_EQ(row < capacity ? row : -1, expected);
              kept += expected >= 0 ? 1 : 0;
            }
            EXPECT_EQ(plan.kept[static_cast<size_t>(expert)], kept);
            num_kept += kept;
          }
          int64_t arrived = 0;
          for (const int64_t count : plan.m_splits) {
            EXPECT_GE(count, 0);
            arrived += count;
          }
          EXPECT_LE(arrived, capacity);
          EXPECT_EQ(plan.totals,
                    (std::vector<int64_t>{arrived, 1000 - num_kept, sorted - num_kept}));
        }
      });
      EXPECT_EQ(errors, std::vector<std::string>(errors.size()));
    }
  }
}

// Pushes numbered rows and pulls them back, in rounds that nothing separates; members dawdle at
// random. A row carries sender, copy and round, so that one of another round would be seen.
TEST(PeerExchange, HundredsOfRoundsNeedNoReset) {
  const Group group = {.num_members = 3, .num_experts = 6, .num_parts = 3, .capacity = 24};
  constexpr int64_t kWidth = 3;
  constexpr int kRounds = 400;
  std::mt19937 random(5);
  std::vector<Counts> rounds;
  for (int round = 0; round < kRounds; ++round) {
    rounds.push_back(random_counts(group, random));
  }
  const auto errors =
      run_members(layout_of(group, kWidth * 4), [&](PeerExchange& peers, int64_t me) {
        std::mt19937 own(static_cast<unsigned>(me));
        const auto dawdle = [&own] {
          if (own() % 16 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
          }
        };
        const auto position = static_cast<size_t>(me);
        for (int round = 0; round < kRounds; ++round) {
          const Counts& counts = rounds[static_cast<size_t>(round)];
          const std::vector<std::vector<int64_t>> by_list = rows_by_list(group, counts);
          const auto num_copies = static_cast<int64_t>(by_list[position].size());
          std::vector<float> tokens(static_cast<size_t>(num_copies * kWidth));
          std::vector<float> probs(static_cast<size_t>(num_copies));
          std::vector<int64_t> map = by_list[position];
          int64_t copy = 0;
          for (int64_t expert = 0; expert < group.num_experts; ++expert) {
            for (int64_t i = 0; i < counts[position][static_cast<size_t>(expert)]; ++i, ++copy) {
              const auto at = static_cast<size_t>(copy);
              map[at] = map[at] < 0 ? -1 : map[at] + expert / 2 * group.capacity;
              probs[at] = static_cast<float>(round + 1000 * me);
              for (int64_t k = 0; k < kWidth; ++k) {
                tokens[at * kWidth + static_cast<size_t>(k)] =
                    static_cast<float>(1000000 * me + 1000 * copy + round % 1000);
              }
            }
          }
          Plan plan(group);
          dawdle();
          peers.send_counts(counts[position].data(), group.shape(me));
          peers.plan(group.shape(me), plan.pointers());
          const int64_t arrived = plan.totals[0];
          const PeerMap where = {.rows = map.data(),
                                 .num_tokens = num_copies,
                                 .num_choices = 1,
                                 .repeats = 1,
                                 .capacity = group.capacity};
          std::vector<float> rows(static_cast<size_t>(group.capacity * kWidth), -1.0F);
          std::vector<float> row_probs(static_cast<size_t>(group.capacity), -1.0F);
          const PeerRows arriving = {.rows = reinterpret_cast<std::byte*>(rows.data()),
                                     .probs = row_probs.data(),
                                     .width = kWidth};
          PeerRows own_rows = {.rows = reinterpret_cast<std::byte*>(tokens.data()),
                               .probs = probs.data(),
                               .width = kWidth};
          dawdle();
          const int64_t slot = round % kPeerSlots;
          peers.start_push(slot, own_rows, where);
          dawdle();
          peers.finish_push(slot, arriving, arrived, group.capacity);
          for (int64_t row = 0; row < group.capacity; ++row) {
            const float sender_and_round = row_probs[static_cast<size_t>(row)];
            if (row >= arrived) {
              ASSERT_EQ(sender_and_round, -1.0F) << "a row of nobody is not written";
              ASSERT_EQ(rows[static_cast<size_t>(row * kWidth)], -1.0F);
            } else {
              ASSERT_EQ(static_cast<int>(sender_and_round) % 1000, round) << "of another round";
            }
          }
          std::vector<float> back(tokens.size(), -1.0F);
          std::vector<float> back_probs(probs.size(), -1.0F);
          dawdle();
          PeerRows published = arriving;
          if ((round + me) % 2 == 0) {  // as a product that writes where others will read
            std::byte* const there = peers.reserve_pull(1 - slot);
            dawdle();
            std::memcpy(there, arriving.rows, static_cast<size_t>(arrived * arriving.row_bytes()));
            published.rows = nullptr;
          }
          peers.start_pull(1 - slot, published, arrived);
          peers.finish_pull(1 - slot,
                            {.rows = reinterpret_cast<std::byte*>(back.data()),
                             .probs = back_probs.data(),
                             .width = kWidth},
                            where);
          for (size_t i = 0; i < back.size(); ++i) {
            const bool is_sent = map[i / kWidth] >= 0;
            ASSERT_EQ(back[i], is_sent ? tokens[i] : 0.0F);
            ASSERT_EQ(back_probs[i / kWidth], is_sent ? probs[i / kWidth] : 0.0F);
          }
        }
      });
  EXPECT_EQ(errors, std::vector<std::string>(errors.size()));
}

// Experts 0 to 2 are on members 0 and 2, experts 3 to 5 on members 1 and 3.
TEST(PeerRows, ATokenTravelsOnceToEachMemberOfItsExperts) {
  const std::vector<int64_t> experts = {0, 2, 4, 5, 3, -1, 1, 6};
  const std::vector<int64_t> sorted = {0, 1, 2, 3, 4, -1, 5, 6};
  const std::vector<int64_t> shift(6, 1);
  const std::vector<int64_t> members = {0, 2, 1, 3};
  std::vector<int64_t> map(16);
  map_copies({.experts = experts.data(),
              .sorted = sorted.data(),
              .shift = shift.data(),
              .members = members.data(),
              .num_tokens = 2,
              .num_choices = 4,
              .num_experts = 6,
              .num_parts = 2,
              .repeats = 2,
              .capacity = 6},
             map.data());
  // Row 7 of expert 1 and expert 6 do not exist.
  const std::vector<int64_t> expected = {1,
                                         13,
                                         entry_beside(2),
                                         entry_beside(14),
                                         9,
                                         21,
                                         entry_beside(10),
                                         entry_beside(22),
                                         11,
                                         23,
                                         -1,
                                         -1,
                                         -1,
                                         -1,
                                         -1,
                                         -1};
  EXPECT_EQ(map, expected);
  EXPECT_EQ(source_row(map.data(), 1, 6), 1);
  EXPECT_EQ(source_row(map.data(), 3, 6), 1);
  EXPECT_EQ(source_row(map.data(), 7, 6), 3);
}

TEST(PeerExchange, EpochsMayWrapAround) {
  EXPECT_TRUE(parallel::has_reached(5, 5));
  EXPECT_TRUE(parallel::has_reached(6, 5));
  EXPECT_FALSE(parallel::has_reached(4, 5));
  EXPECT_TRUE(parallel::has_reached(1, 0xffffffffU));
  EXPECT_FALSE(parallel::has_reached(0xffffffffU, 1));
}

TEST(PeerExchange, ChoicesArePlannedInOneCallAsInFour) {
  const Group group = {.num_members = 4, .num_experts = 6, .num_parts = 2, .capacity = 25};
  constexpr int64_t kTokens = 9;
  constexpr int64_t kChoices = 3;
  const auto errors = run_members(layout_of(group, 4), [&](PeerExchange& peers, int64_t me) {
    std::mt19937 random(static_cast<unsigned>(me));
    std::uniform_int_distribution<int64_t> any(-1, group.num_experts - 1);
    std::vector<int64_t> chosen(kTokens * kChoices);
    std::generate(chosen.begin(), chosen.end(), [&] { return any(random); });
    const std::vector<int64_t> owners = {0, 2, 1, 3};
    PeerRouting routing = {.experts = chosen.data(),
                           .members = owners.data(),
                           .num_tokens = kTokens,
                           .num_choices = kChoices,
                           .num_experts = group.num_experts,
                           .num_parts = group.num_parts,
                           .repeats = 2,
                           .capacity = group.capacity};
    Plan plan(group), expected(group);
    std::vector<int64_t> map(2 * chosen.size(), -7), expected_map = map;
    peers.plan_copies(group.shape(me), routing, plan.pointers(std::ssize(chosen)), map.data());

    std::vector<int64_t> sorted(chosen.size());
    std::vector<int64_t> counts(static_cast<size_t>(group.num_experts));
    sort_by_expert(chosen.data(), std::ssize(chosen), group.num_experts, sorted.data(),
                   counts.data());
    peers.send_counts(counts.data(), group.shape(me));
    peers.plan(group.shape(me), expected.pointers(std::ssize(chosen)));
    routing.sorted = sorted.data();
    routing.shift = expected.shift.data();
    map_copies(routing, expected_map.data());
    EXPECT_EQ(map, expected_map);
    EXPECT_EQ(plan.kept, expected.kept);
    EXPECT_EQ(plan.m_splits, expected.m_splits);
    EXPECT_EQ(plan.totals, expected.totals);
    EXPECT_GT(plan.totals[1], 0);
  });
  EXPECT_EQ(errors, std::vector<std::string>(errors.size()));
}

TEST(PeerExchange, AnotherCapacityIsRefusedByAllWhoSeeIt) {
  Group group;
  const auto errors = run_members(layout_of(group, 4), [&](PeerExchange& peers, int64_t me) {
    Group mine = group;
    mine.capacity = me == 1 ? 6 : 8;
    const std::vector<int64_t> counts(4, 1);
    Plan plan(group);
    peers.send_counts(counts.data(), mine.shape(me));
    peers.plan(mine.shape(me), plan.pointers());
  });
  EXPECT_EQ(errors[0],
            "rank 11 keeps 6 rows for its experts, but rank 10 8; all need equally many tokens and "
            "one budget");
  EXPECT_EQ(errors[1],
            "rank 10 keeps 8 rows for its experts, but rank 11 6; all need equally many tokens and "
            "one budget");
}

TEST(PeerExchange, AMapThatPointsOutsideIsRefusedBeforeAnythingIsWritten) {
  const Group group;
  const auto errors = run_members(layout_of(group, 4), [&](PeerExchange& peers, int64_t) {
    const std::vector<int64_t> map = {group.num_members * group.capacity};
    std::vector<float> token(1);
    peers.start_push(0, {.rows = reinterpret_cast<std::byte*>(token.data()), .width = 1},
                     {.rows = map.data(), .num_tokens = 1, .num_choices = 1, .capacity = 8});
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error,
              "row 16 of copy 0 is not among the 16 rows of all members; use -1 for a copy that is "
              "not sent");
  }
}

TEST(PeerExchange, AMemberThatDoesNotComeEndsTheWait) {
  const Group group;
  const auto errors = run_members(
      layout_of(group, 4),
      [&](PeerExchange& peers, int64_t me) {
        const std::vector<int64_t> counts(4, 1);
        Plan plan(group);
        if (me == 0) {
          peers.send_counts(counts.data(), group.shape(me));
          peers.plan(group.shape(me), plan.pointers());
        }
      },
      0.2);
  EXPECT_NE(errors[0].find("timed out after 0.2 s: rank 11 (position 1"), std::string::npos)
      << errors[0];
}

}  // namespace
}  // namespace megacore::moe
