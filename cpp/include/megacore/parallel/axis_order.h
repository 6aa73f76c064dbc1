// Names of the parallel axes, and texts that list them.
//
// An order such as "tp-cp-ep-dp-pp" lists axes from the fastest-varying one (its ranks are
// neighbours) to the slowest. A token such as "dp-cp" is a set of axes. Both are axis names joined
// by single dashes; parsing is strict, and every error has the legal values.
//
//   parse_order("tp-dp-pp");                                // {"tp", "dp", "pp"}
//   arrange({{"tp", 4}, {"dp", 2}, {"pp", 1}}, "dp-tp");    // {{"dp", 2}, {"tp", 4}, {"pp", 1}}

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace megacore::parallel {

inline constexpr std::string_view kDefaultOrder = "tp-cp-ep-dp-pp";

// The axes of an order. The expert view of a world has etp in place of tp and edp in place of dp.
inline constexpr std::array<std::string_view, 5> kAxes = {"tp", "cp", "ep", "dp", "pp"};

struct AxisSize {
  std::string axis;
  int64_t size;  // ranks along this axis, >= 1

  friend bool operator==(const AxisSize&, const AxisSize&) = default;
};

// The axes of `order`, fastest first.
// REQUIRES: no empty piece, only axes of kAxes, each at most once.
std::vector<std::string> parse_order(std::string_view order);

// The axes of `token`, in the order they are written, checked against the axes of a layout. In a
// layout with an axis "etp", "tp" is an alias of it, and "dp" of "edp".
// REQUIRES: no empty piece, only axes of `layout`, each at most once.
std::vector<std::string> parse_token(std::string_view token, std::span<const AxisSize> layout);

// `sizes` sorted by `order`. An axis of size 1 that is not in the order is last: it has one
// position, so its place changes nothing.
// REQUIRES: `order` parses and names every axis of `sizes` that is larger than 1.
std::vector<AxisSize> arrange(std::span<const AxisSize> sizes, std::string_view order);

// "tp 2 x cp 1 x pp 4 = 8". Throws if the product exceeds 64 bits.
std::string product_text(std::span<const AxisSize> factors);

// Product of the sizes; 1 for no factor. Throws if it exceeds 64 bits.
int64_t product(std::span<const AxisSize> factors);

}  // namespace megacore::parallel
