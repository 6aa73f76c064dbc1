#include "megacore/parallel/host_segment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace megacore::parallel {
namespace {

std::string unique_name(const std::string& what) {
  return "/megacore-test-" + std::to_string(getpid()) + "-" + what;
}

bool exists(const std::string& name) { return std::filesystem::exists("/dev/shm" + name); }

TEST(HostSegment, IsSharedAndStartsAtZero) {
  const std::string name = unique_name("shared");
  const HostSegment mine = HostSegment::create(name, 10000);
  const HostSegment theirs = HostSegment::open(name, 10000);
  HostSegment::remove(name);
  EXPECT_FALSE(exists(name));
  EXPECT_NE(mine.data(), theirs.data());
  EXPECT_EQ(theirs.data()[9999], std::byte{0});
  mine.data()[9999] = std::byte{42};
  EXPECT_EQ(theirs.data()[9999], std::byte{42});
}

TEST(HostSegment, OutlivesTheOneWhoCreatedIt) {
  const std::string name = unique_name("outlives");
  auto mine = std::make_unique<HostSegment>(HostSegment::create(name, 4096));
  const HostSegment moved = std::move(*mine);
  mine.reset();
  const HostSegment theirs = HostSegment::open(name, 4096);
  HostSegment::remove(name);
  moved.data()[0] = std::byte{1};
  EXPECT_EQ(theirs.data()[0], std::byte{1});
}

TEST(HostSegment, SaysWhyItCannotBeMade) {
  const std::string name = unique_name("taken");
  const HostSegment first = HostSegment::create(name, 4096);
  EXPECT_THROW(HostSegment::create(name, 4096), std::runtime_error);
  EXPECT_TRUE(exists(name));  // not ours to remove
  EXPECT_THROW(HostSegment::open(name, 8192), std::runtime_error);
  HostSegment::remove(name);
  HostSegment::remove(name);
  try {
    HostSegment::open(name, 4096);
    FAIL() << "opened a removed segment";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
  EXPECT_THROW(HostSegment::create(name, 0), std::invalid_argument);
}

TEST(HostSegment, MoreThanThereIsLeavesNothingBehind) {
  const std::string name = unique_name("huge");
  EXPECT_THROW(HostSegment::create(name, int64_t{1} << 60), std::runtime_error);
  EXPECT_FALSE(exists(name));
}

}  // namespace
}  // namespace megacore::parallel
