#include "megacore/parallel/host_comm.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host_comm_group.h"

namespace megacore::parallel {
namespace {

// Sizes around those of a piece, for every size of group and of slot.
void for_shapes(const std::function<void(const GroupShape&, int64_t)>& body) {
  for (const int size : {2, 3, 4}) {
    for (const int64_t slot_bytes : {256, 1024, 1 << 18}) {
      for (const int64_t numel : {0, 1, 7, 64, 65, 1000, 30011}) {
        SCOPED_TRACE(testing::Message()
                     << size << " members, slots of " << slot_bytes << ", numel " << numel);
        body({.size = size, .slot_bytes = slot_bytes}, numel);
      }
    }
  }
}

TEST(HostComm, AllReduceAddsInTheOrderOfPositions) {
  for_shapes([](const GroupShape& shape, int64_t numel) {
    expect_no_errors(run_threads(shape, [numel](HostComm& comm) {
      std::vector<float> data = values_of(comm.position(), numel);
      comm.all_reduce(bytes(data), numel, HostDtype::kFloat32, HostReduction::kSum);
      for (int64_t i = 0; i < numel; ++i) {
        ASSERT_EQ(data[static_cast<size_t>(i)], sum_at(comm.size(), i)) << i;
      }
    }));
  });
}

TEST(HostComm, ReduceScatterGivesEachItsSliceOfTheSum) {
  for_shapes([](const GroupShape& shape, int64_t numel) {
    expect_no_errors(run_threads(shape, [numel](HostComm& comm) {
      std::vector<float> input = values_of(comm.position(), numel * comm.size());
      std::vector<float> output(static_cast<size_t>(numel));
      comm.reduce_scatter({.output = bytes(output), .input = bytes(input), .numel = numel});
      for (int64_t i = 0; i < numel; ++i) {
        const int64_t index = comm.position() * numel + i;
        ASSERT_EQ(output[static_cast<size_t>(i)], sum_at(comm.size(), index)) << i;
      }
    }));
  });
}

TEST(HostComm, AllGatherAndBroadcastCopyEveryElement) {
  for_shapes([](const GroupShape& shape, int64_t numel) {
    expect_no_errors(run_threads(shape, [numel](HostComm& comm) {
      std::vector<float> input = values_of(comm.position(), numel);
      std::vector<float> output(static_cast<size_t>(numel * comm.size()));
      comm.all_gather(bytes(output), bytes(input), numel, HostDtype::kFloat32);
      for (int p = 0; p < comm.size(); ++p) {
        for (int64_t i = 0; i < numel; ++i) {
          ASSERT_EQ(output[static_cast<size_t>(p * numel + i)], value_of(p, i));
        }
      }
      const int source = comm.size() - 1;
      comm.broadcast(bytes(input), numel, HostDtype::kFloat32, source);
      ASSERT_EQ(input, values_of(source, numel));
    }));
  });
}

TEST(HostComm, OutputMayOverlapTheInputAnywhere) {
  constexpr int64_t kNumel = 3000;
  constexpr GroupShape kShape = {.size = 3, .slot_bytes = 1024};
  for (const int64_t offset : {int64_t{0}, kNumel, 2 * kNumel, int64_t{5}, kNumel + 1}) {
    SCOPED_TRACE(offset);
    expect_no_errors(run_threads(kShape, [offset](HostComm& comm) {
      std::vector<float> buffer = values_of(comm.position(), 3 * kNumel + 8);
      comm.reduce_scatter(
          {.output = bytes(buffer) + 4 * offset, .input = bytes(buffer), .numel = kNumel});
      for (int64_t i = 0; i < kNumel; ++i) {
        ASSERT_EQ(buffer[static_cast<size_t>(offset + i)], sum_at(3, comm.position() * kNumel + i));
      }
      buffer = values_of(comm.position(), 3 * kNumel + 8);
      comm.all_gather(bytes(buffer), bytes(buffer) + 4 * offset, kNumel, HostDtype::kFloat32);
      for (int64_t i = 0; i < 3 * kNumel; ++i) {
        ASSERT_EQ(buffer[static_cast<size_t>(i)],
                  value_of(static_cast<int>(i / kNumel), offset + i % kNumel));
      }
    }));
  }
}

TEST(HostComm, OverlapWithAnotherTypeIsSafe) {
  expect_no_errors(run_threads({.size = 2, .slot_bytes = 256}, [](HostComm& comm) {
    std::vector<uint16_t> buffer(4000, 0x3f80);  // 1.0 in bfloat16
    comm.reduce_scatter({.output = bytes(buffer),
                         .output_dtype = HostDtype::kFloat32,
                         .input = bytes(buffer),
                         .dtype = HostDtype::kBFloat16,
                         .numel = 2000});
    const auto* sums = reinterpret_cast<const float*>(buffer.data());
    for (int i = 0; i < 2000; ++i) {
      ASSERT_EQ(sums[i], 2.0F);
    }
  }));
}

TEST(HostComm, ManyCallsInARowDoNotMixUp) {
  expect_no_errors(run_threads({.size = 4, .slot_bytes = 512}, [](HostComm& comm) {
    for (int64_t round = 0; round < 500; ++round) {
      std::vector<int64_t> data(static_cast<size_t>(round % 200), round + comm.position());
      const auto numel = static_cast<int64_t>(data.size());
      comm.all_reduce(bytes(data), numel, HostDtype::kInt64, HostReduction::kMax);
      ASSERT_EQ(data, std::vector<int64_t>(data.size(), round + 3));
      comm.barrier();
      comm.broadcast(bytes(data), numel, HostDtype::kInt64, static_cast<int>(round % 4));
    }
  }));
}

TEST(HostComm, NobodyPassesABarrierAlone) {
  std::atomic<int> num_arrived = 0;
  expect_no_errors(run_threads({.size = 4}, [&num_arrived](HostComm& comm) {
    for (int round = 1; round <= 50; ++round) {
      num_arrived.fetch_add(1);
      comm.barrier();
      ASSERT_GE(num_arrived.load(), 4 * round);
    }
  }));
}

TEST(HostComm, DifferentCallsAreToldToAllAndDoNoHarm) {
  const std::vector<std::string> errors = run_threads({.size = 3}, [](HostComm& comm) {
    std::vector<float> data(6, 1.0F);
    std::string message;
    try {
      if (comm.position() == 2) {
        comm.all_gather(bytes(data), bytes(data), 2, HostDtype::kFloat32);
      } else {
        comm.all_reduce(bytes(data), 6, HostDtype::kFloat32, HostReduction::kSum);
      }
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    std::vector<float> after(5, 1.0F);
    comm.all_reduce(bytes(after), 5, HostDtype::kFloat32, HostReduction::kSum);
    EXPECT_EQ(after, std::vector<float>(5, 3.0F));
    throw std::runtime_error(message);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 10 (position 0, pid"), std::string::npos) << error;
    EXPECT_NE(error.find("in all_reduce (sum) of 6 float32"), std::string::npos) << error;
    EXPECT_NE(error.find("rank 12 (position 2, pid"), std::string::npos) << error;
    EXPECT_NE(error.find("in all_gather of 2 float32 per member"), std::string::npos) << error;
  }
}

TEST(HostComm, DifferentSizesTypesAndSourcesAreDifferentCalls) {
  using Call = std::function<void(HostComm&, std::byte*)>;
  const std::vector<std::pair<Call, Call>> pairs = {
      {[](HostComm& c, std::byte* d) { c.broadcast(d, 8, HostDtype::kInt8, 0); },
       [](HostComm& c, std::byte* d) { c.broadcast(d, 8, HostDtype::kInt8, 1); }},
      {[](HostComm& c, std::byte* d) { c.broadcast(d, 8, HostDtype::kInt8, 0); },
       [](HostComm& c, std::byte* d) { c.broadcast(d, 9, HostDtype::kInt8, 0); }},
      {[](HostComm& c, std::byte* d) {
         c.all_reduce(d, 8, HostDtype::kFloat32, HostReduction::kSum);
       },
       [](HostComm& c, std::byte* d) {
         c.all_reduce(d, 8, HostDtype::kFloat32, HostReduction::kAvg);
       }},
      {[](HostComm& c, std::byte* d) {
         c.all_reduce(d, 8, HostDtype::kFloat32, HostReduction::kSum);
       },
       [](HostComm& c, std::byte* d) {
         c.all_reduce(d, 8, HostDtype::kInt32, HostReduction::kSum);
       }},
      {[](HostComm& c, std::byte*) { c.barrier(); },
       [](HostComm& c, std::byte* d) { c.broadcast(d, 0, HostDtype::kInt8, 0); }},
  };
  for (const auto& [first, second] : pairs) {
    const std::vector<std::string> errors = run_threads({.size = 2}, [&](HostComm& comm) {
      std::vector<float> data(16);
      (comm.position() == 0 ? first : second)(comm, bytes(data));
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("in different calls"), std::string::npos) << error;
    }
  }
}

TEST(HostComm, ATimeoutNamesAllThatDidNotComeAndSoDoLaterCalls) {
  const GroupShape shape = {.size = 4, .timeout_s = 0.3};
  const std::vector<std::string> errors = run_threads(shape, [](HostComm& comm) {
    comm.barrier();
    if (comm.position() % 2 == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(800));
    }
    std::vector<float> data(4);
    comm.all_reduce(bytes(data), 4, HostDtype::kFloat32, HostReduction::kSum);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("all_reduce over ranks 10, 11, 12, 13 of this host timed out after 0.3 s: "
                         "rank 11 (position 1, pid"),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("rank 13 (position 3, pid"), std::string::npos) << error;
    EXPECT_EQ(error.find("rank 12 (position 2"), std::string::npos) << error;
  }
}

TEST(HostComm, AMemberThatNeverJoinedIsNamedAfterTheTimeout) {
  const GroupShape shape = {.size = 2, .timeout_s = 0.2};
  const SharedMemory memory = memory_for(shape);
  const auto comm = join(memory, shape, 0);
  try {
    comm->barrier();
    FAIL() << "met nobody";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 11 (position 1, not started) did not come"),
              std::string::npos)
        << error.what();
  }
  // Once failed, always failed, in another call as well.
  std::vector<float> data(1);
  try {
    comm->broadcast(bytes(data), 1, HostDtype::kFloat32, 0);
    FAIL() << "met nobody";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("did not come in an earlier barrier"),
              std::string::npos)
        << error.what();
  }
}

TEST(HostComm, AMemberThatLeftIsNamedLongBeforeTheTimeout) {
  const GroupShape shape = {.size = 2, .timeout_s = 60.0};
  const SharedMemory memory = memory_for(shape);
  const auto comm = join(memory, shape, 0);
  join(memory, shape, 1).reset();
  try {
    comm->barrier();
    FAIL() << "met somebody who has left";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("has left the group"), std::string::npos)
        << error.what();
  }
}

TEST(HostComm, AnInterruptedMemberRethrowsAndTellsTheOthers) {
  const GroupShape shape = {.size = 3};
  const SharedMemory memory = memory_for(shape);
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int position = 0; position < 2; ++position) {  // position 2 never comes
    threads.emplace_back([&, position] {
      HostCommConfig config = {.position = position, .ranks = ranks_of(shape), .slot_bytes = 1024};
      if (position == 1) {
        config.while_waiting = [] { throw std::out_of_range("Ctrl-C"); };
      }
      HostComm comm(memory.segment(), config);
      try {
        comm.barrier();
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(position)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(errors[1], "Ctrl-C");
  EXPECT_NE(errors[0].find("rank 11 (position 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("was interrupted"), std::string::npos) << errors[0];
}

TEST(HostComm, RefusesSettingsThatBreakTheRules) {
  const SharedMemory memory(1 << 16);
  const auto make = [&memory](HostCommConfig config) { HostComm(memory.segment(), config); };
  EXPECT_THROW(make({.position = 0, .ranks = {}}), std::invalid_argument);
  EXPECT_THROW(make({.position = 2, .ranks = {0, 1}, .slot_bytes = 128}), std::invalid_argument);
  EXPECT_THROW(make({.ranks = {0, 1}, .slot_bytes = 64}), std::invalid_argument);
  EXPECT_THROW(make({.ranks = {0, 1}, .slot_bytes = 200}), std::invalid_argument);
  EXPECT_THROW(make({.ranks = {0, 1}, .slot_bytes = 1 << 20}), std::invalid_argument);
  EXPECT_THROW(make({.ranks = {0, 1}, .slot_bytes = 128, .timeout_s = 0}), std::invalid_argument);
}

TEST(HostComm, RefusesCallsThatCannotBe) {
  const SharedMemory memory(1 << 16);
  HostComm comm(memory.segment(), {.ranks = {0}, .slot_bytes = 64});
  std::vector<int> data(4);
  EXPECT_THROW(comm.all_reduce(bytes(data), 4, HostDtype::kInt32, HostReduction::kAvg),
               std::invalid_argument);
  EXPECT_THROW(comm.all_reduce(bytes(data), -1, HostDtype::kInt32, HostReduction::kSum),
               std::invalid_argument);
  EXPECT_THROW(comm.broadcast(bytes(data), 4, HostDtype::kInt32, 1), std::invalid_argument);
  EXPECT_THROW(comm.reduce_scatter({.output = bytes(data),
                                    .output_dtype = HostDtype::kInt32,
                                    .input = bytes(data),
                                    .dtype = HostDtype::kFloat32,
                                    .numel = 4}),
               std::invalid_argument);
  comm.all_reduce(bytes(data), 4, HostDtype::kInt32, HostReduction::kSum);  // works afterwards
}

}  // namespace
}  // namespace megacore::parallel
