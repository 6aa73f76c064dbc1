#include "megacore/base/crc32.h"

#include <array>

#include "megacore/base/vector_clones.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megacore::base {
namespace {

// The coefficient of x^i is bit 31 - i: bytes enter the least significant bit first.
constexpr uint32_t kPolynomial = 0xEDB88320U;
constexpr uint32_t kOne = 0x80000000U;

constexpr uint32_t times_x(uint32_t a) { return (a & 1U) != 0 ? (a >> 1) ^ kPolynomial : a >> 1; }

// a * b modulo the polynomial.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    product ^= (a & bit) != 0 ? b : 0;
    b = times_x(b);
  }
  return product;
}

// x^exponent modulo the polynomial.
constexpr uint32_t power_of_x(uint64_t exponent) {
  uint32_t power = kOne;
  for (uint32_t square = times_x(kOne); exponent != 0; exponent >>= 1) {
    power = (exponent & 1U) != 0 ? multiply(power, square) : power;
    square = multiply(square, square);
  }
  return power;
}

constexpr std::array<uint32_t, 256> byte_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = times_x(value);
    }
    table[byte] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kByteTable = byte_table();

// The states here and below are checksums before the final inversion.
uint32_t update_bytes(const std::byte* data, size_t size, uint32_t state) {
  for (size_t i = 0; i < size; ++i) {
    state = kByteTable[(state ^ static_cast<uint32_t>(data[i])) & 0xFFU] ^ (state >> 8);
  }
  return state;
}

#if defined(__x86_64__)

// Moves 128 bits over a distance: the products of their halves with these numbers, added, are
// congruent to them times x^(8 num_bytes). A product of reflected numbers is shifted by one bit,
// hence the doubling.
struct FoldFactors {
  uint64_t low, high;
};
constexpr FoldFactors fold_factors(uint64_t num_bytes) {
  return {.low = uint64_t{power_of_x(8 * num_bytes + 32)} << 1,
          .high = uint64_t{power_of_x(8 * num_bytes - 32)} << 1};
}

[[gnu::target("pclmul,sse4.1"), gnu::always_inline]] inline __m128i fold(__m128i sum,
                                                                         __m128i next,
                                                                         __m128i factors) {
  const __m128i low = _mm_clmulepi64_si128(sum, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(sum, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

[[gnu::target("pclmul,sse4.1"), gnu::always_inline]] inline __m128i factors_128(
    FoldFactors factors) {
  return _mm_set_epi64x(static_cast<int64_t>(factors.high), static_cast<int64_t>(factors.low));
}

[[gnu::target("pclmul,sse4.1"), gnu::always_inline]] inline __m128i load_128(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// Folds whole groups of 64 bytes, at least one; returns the state and advances `data` and `size`.
[[gnu::target("pclmul,sse4.1")]] uint32_t update_128(const std::byte*& data,
                                                     size_t& size,
                                                     uint32_t state) {
  __m128i sums[4];
  for (size_t lane = 0; lane < 4; ++lane) {
    sums[lane] = load_128(data + 16 * lane);
  }
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  constexpr FoldFactors kBy64 = fold_factors(64);
  constexpr FoldFactors kBy16 = fold_factors(16);
  const __m128i by_64 = factors_128(kBy64);
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
    for (size_t lane = 0; lane < 4; ++lane) {
      sums[lane] = fold(sums[lane], load_128(data + 16 * lane), by_64);
    }
  }
  const __m128i by_16 = factors_128(kBy16);
  for (size_t lane = 1; lane < 4; ++lane) {
    sums[0] = fold(sums[0], sums[lane], by_16);
  }
  std::array<std::byte, 16> rest;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest.data()), sums[0]);
  return update_bytes(rest.data(), rest.size(), 0);
}

// The same for groups of 256 bytes.
[[gnu::target("avx512f,vpclmulqdq,pclmul,sse4.1")]] uint32_t update_512(const std::byte*& data,
                                                                        size_t& size,
                                                                        uint32_t state) {
  __m512i sums[4];
  for (size_t lane = 0; lane < 4; ++lane) {
    sums[lane] = _mm512_loadu_si512(data + 64 * lane);
  }
  sums[0] =
      _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  constexpr FoldFactors kFactors = fold_factors(256);
  constexpr auto kLow = static_cast<int64_t>(kFactors.low);
  constexpr auto kHigh = static_cast<int64_t>(kFactors.high);
  const __m512i by_256 = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
  for (data += 256, size -= 256; size >= 256; data += 256, size -= 256) {
    for (size_t lane = 0; lane < 4; ++lane) {
      const __m512i low = _mm512_clmulepi64_epi128(sums[lane], by_256, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(sums[lane], by_256, 0x11);
      const __m512i next = _mm512_loadu_si512(data + 64 * lane);
      sums[lane] = _mm512_xor_si512(_mm512_xor_si512(low, high), next);
    }
  }
  std::array<std::byte, 256> rest;
  for (size_t lane = 0; lane < 4; ++lane) {
    _mm512_storeu_si512(rest.data() + 64 * lane, sums[lane]);
  }
  const std::byte* at = rest.data();
  size_t left = rest.size();
  return update_128(at, left, 0);
}

#endif

}  // namespace

bool has_fast_crc32() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
#else
  return false;
#endif
}

uint32_t crc32(std::span<const std::byte> data, uint32_t crc) {
  const std::byte* at = data.data();
  size_t size = data.size();
  uint32_t state = ~crc;
#if defined(__x86_64__)
  static const bool kHas128 = has_fast_crc32();
  static const bool kHas512 =
      kHas128 && vector_bits() == 512 && __builtin_cpu_supports("vpclmulqdq") != 0;
  if (kHas512 && size >= 256) {
    state = update_512(at, size, state);
  }
  if (kHas128 && size >= 64) {
    state = update_128(at, size, state);
  }
#endif
  return ~update_bytes(at, size, state);
}

uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t num_bytes_second) {
  return multiply(first, power_of_x(8 * num_bytes_second)) ^ second;
}

}  // namespace megacore::base
