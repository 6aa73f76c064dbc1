#include "megacore/base/normal.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "megacore/base/check.h"
#include "megacore/base/low_precision.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/splitmix.h"
#include "megacore/base/vector_clones.h"

namespace megacore::base {
namespace {

// Pairs computed at a time, in the nearest cache.
constexpr int64_t kBlockOfPairs = 256;
// Numbers that are worth a thread.
constexpr int64_t kGrainOfNormal = 1 << 15;

// ln x of x in (0, 1], a normal number.
[[gnu::always_inline]] inline float logarithm(float x) {
  // x = m 2^e with m in [sqrt(1/2), sqrt(2)).
  constexpr uint32_t kHalfRoot = 0x3F3504F3;
  const uint32_t shifted = bits_of_float(x) - kHalfRoot;
  const auto e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float y = float_of_bits((shifted & 0x007FFFFF) + kHalfRoot) - 1.0F;
  const float square = y * y;
  float sum = 7.0376836292E-2F;
  sum = sum * y - 1.1514610310E-1F;
  sum = sum * y + 1.1676998740E-1F;
  sum = sum * y - 1.2420140846E-1F;
  sum = sum * y + 1.4249322787E-1F;
  sum = sum * y - 1.6668057665E-1F;
  sum = sum * y + 2.0000714765E-1F;
  sum = sum * y - 2.4999993993E-1F;
  sum = sum * y + 3.3333331174E-1F;
  sum = sum * y * square - 2.12194440E-4F * e - 0.5F * square;
  return (y + sum) + 0.693359375F * e;
}

struct Direction {
  float cos;
  float sin;
};

// Cosine and sine of 2 pi angle / 2^32.
[[gnu::always_inline]] inline Direction direction(uint32_t angle) {
  // The nearest quarter turn, and the rest within an eighth of a turn.
  const uint32_t quarter = (angle + 0x20000000U) >> 30;
  const auto rest = static_cast<int32_t>(angle - (quarter << 30));
  const float x = static_cast<float>(rest) * (std::numbers::pi_v<float> * 0x1p-31F);
  const float z = x * x;
  const float sin = ((-1.9515295891E-4F * z + 8.3321608736E-3F) * z - 1.6666654611E-1F) * z * x + x;
  const float cos =
      ((2.443315711809948E-5F * z - 1.388731625493765E-3F) * z + 4.166664568298827E-2F) * z * z -
      0.5F * z + 1.0F;
  const bool swaps = (quarter & 1) != 0;
  const float c = swaps ? sin : cos;
  const float s = swaps ? cos : sin;
  // Cosine is negative after one and two quarter turns, sine after two and three.
  const uint32_t sign_of_cos = ((quarter + 1) & 2) << 30;
  const uint32_t sign_of_sin = (quarter & 2) << 30;
  return {.cos = float_of_bits(bits_of_float(c) ^ sign_of_cos),
          .sin = float_of_bits(bits_of_float(s) ^ sign_of_sin)};
}

// Numbers of `kBlockOfPairs` pairs, two per pair; `state` is that of SplitMix64 before the first.
MC_VECTOR_CLONES void fill_block(float* __restrict__ out, uint64_t state, float factor) {
  std::array<uint32_t, kBlockOfPairs> high;
  std::array<uint32_t, kBlockOfPairs> low;
  for (int64_t i = 0; i < kBlockOfPairs; ++i) {
    const uint64_t number = mixed(state + static_cast<uint64_t>(i + 1) * kGolden);
    high[static_cast<size_t>(i)] = static_cast<uint32_t>(number >> 32);
    low[static_cast<size_t>(i)] = static_cast<uint32_t>(number);
  }
  for (int64_t i = 0; i < kBlockOfPairs; ++i) {
    const auto level = static_cast<int32_t>((high[static_cast<size_t>(i)] >> 8) + 1);
    const float radius =
        std::sqrt(-2.0F * logarithm(static_cast<float>(level) * 0x1p-24F)) * factor;
    const Direction to = direction(low[static_cast<size_t>(i)]);
    out[2 * i] = radius * to.cos;
    out[2 * i + 1] = radius * to.sin;
  }
}

// Numbers [begin, begin + length) of the stream.
void fill_stretch(float* out, int64_t begin, int64_t length, uint64_t start, float factor) {
  constexpr int64_t kBlock = 2 * kBlockOfPairs;
  std::array<float, kBlock> block;
  int64_t skipped = begin % 2;
  for (int64_t pair = begin / 2; length > 0; pair += kBlockOfPairs) {
    const uint64_t state = start + static_cast<uint64_t>(pair) * kGolden;
    const int64_t taken = std::min(length, kBlock - skipped);
    if (taken == kBlock) {
      fill_block(out, state, factor);
    } else {
      fill_block(block.data(), state, factor);
      std::copy_n(block.data() + skipped, taken, out);
    }
    out += taken;
    length -= taken;
    skipped = 0;
  }
}

}  // namespace

void fill_normal(float* out,
                 const NormalStretches& stretches,
                 uint64_t key,
                 float standard_deviation,
                 int num_threads) {
  MC_REQUIRE(stretches.count >= 0 && stretches.length >= 0 && stretches.first >= 0 &&
                 stretches.stride >= 0,
             "count, length, first and stride must be at least 0, got {}, {}, {} and {}",
             stretches.count, stretches.length, stretches.first, stretches.stride);
  const uint64_t start = mixed(key);
  const int64_t length = stretches.length;
  // Over all numbers written, so that one long stretch is shared too.
  parallel_for(stretches.count * length, kGrainOfNormal, num_threads,
               [&](int64_t begin, int64_t end) {
                 while (begin < end) {
                   const int64_t stretch = begin / length;
                   const int64_t within = begin % length;
                   const int64_t taken = std::min(end - begin, length - within);
                   fill_stretch(out + begin, stretches.first + stretch * stretches.stride + within,
                                taken, start, standard_deviation);
                   begin += taken;
                 }
               });
}

}  // namespace megacore::base
