#include "megacore/base/crc32.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace megacore::base {
namespace {

// The definition, bit by bit.
uint32_t reference(std::span<const std::byte> data, uint32_t crc = 0) {
  uint32_t state = ~crc;
  for (const std::byte byte : data) {
    state ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      state = (state & 1U) != 0 ? (state >> 1) ^ 0xEDB88320U : state >> 1;
    }
  }
  return ~state;
}

std::vector<std::byte> random_bytes(size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

TEST(Crc32, HasThePublishedCheckValue) {
  constexpr std::string_view kDigits = "123456789";
  EXPECT_EQ(crc32(std::as_bytes(std::span(kDigits))), 0xCBF43926U);
  EXPECT_EQ(crc32({}), 0U);
}

TEST(Crc32, EqualsItsDefinitionForEveryLengthAndAlignment) {
  const std::vector<std::byte> bytes = random_bytes(1200);
  for (size_t size = 0; size <= 1100; ++size) {
    const auto part = std::span(bytes).subspan(size % 67, size);
    ASSERT_EQ(crc32(part), reference(part)) << size;
    ASSERT_EQ(crc32(part, 0x12345678U), reference(part, 0x12345678U)) << size;
  }
}

TEST(Crc32, ContinuesAndCombines) {
  const std::vector<std::byte> bytes = random_bytes(5000);
  const std::span<const std::byte> all(bytes);
  for (const size_t at :
       {size_t{0}, size_t{1}, size_t{63}, size_t{700}, size_t{4999}, size_t{5000}}) {
    const uint32_t first = crc32(all.first(at));
    EXPECT_EQ(crc32(all.subspan(at), first), reference(all)) << at;
    EXPECT_EQ(crc32_combine(first, crc32(all.subspan(at)), all.size() - at), reference(all)) << at;
  }
  // 5 GiB of zero bytes, in steps.
  const uint32_t start = crc32(all);
  uint32_t stepped = start;
  for (int step = 0; step < 5; ++step) {
    stepped = crc32_combine(stepped, 0, uint64_t{1} << 30);
  }
  EXPECT_EQ(crc32_combine(start, 0, uint64_t{5} << 30), stepped);
}

}  // namespace
}  // namespace megacore::base
