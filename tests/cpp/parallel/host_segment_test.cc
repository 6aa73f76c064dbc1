#include "megacore/parallel/host_segment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace megacore::parallel {
namespace {

TEST(HostSegment, IsSharedAndStartsAtZero) {
  const HostSegment mine = HostSegment::create(10000);
  const HostSegment theirs = HostSegment::open(getpid(), mine.file(), 10000);
  EXPECT_NE(mine.data(), theirs.data());
  EXPECT_EQ(theirs.data()[9999], std::byte{0});
  mine.data()[9999] = std::byte{42};
  EXPECT_EQ(theirs.data()[9999], std::byte{42});
}

TEST(HostSegment, OutlivesTheOneWhoCreatedIt) {
  auto mine = std::make_unique<HostSegment>(HostSegment::create(4096));
  HostSegment moved = std::move(*mine);
  mine.reset();
  const HostSegment theirs = HostSegment::open(getpid(), moved.file(), 4096);
  moved.close_file();
  moved.data()[0] = std::byte{1};
  EXPECT_EQ(theirs.data()[0], std::byte{1});
}

TEST(HostSegment, SaysWhyItCannotBeMadeOrOpened) {
  EXPECT_THROW(HostSegment::create(0), std::invalid_argument);
  HostSegment first = HostSegment::create(4096);
  const int file = first.file();
  EXPECT_THROW(HostSegment::open(getpid(), file, 8192), std::runtime_error);
  first.close_file();
  EXPECT_EQ(first.file(), -1);
  try {
    HostSegment::open(getpid(), file, 4096);
    FAIL() << "opened a closed segment";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace megacore::parallel
