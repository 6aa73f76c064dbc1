#include "megacore/parallel/axis_order.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <optional>

#include "megacore/base/check.h"
#include "megacore/base/intmath.h"
#include "megacore/base/text.h"

namespace megacore::parallel {
namespace {

using base::format_text;

std::string join(std::span<const std::string> names, std::string_view separator) {
  return base::join(names, separator, std::identity());
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

// The one axis that `wrong` was probably meant to be: the same letters in another case or order.
std::optional<std::string> meant(std::string_view wrong, std::span<const std::string> axes) {
  const std::string small = lower(wrong);
  std::string letters = small;
  std::ranges::sort(letters);
  for (const std::string& axis : axes) {
    std::string axis_letters = axis;
    std::ranges::sort(axis_letters);
    if (small == axis || letters == axis_letters) {
      return axis;
    }
  }
  return std::nullopt;
}

// Splits at dashes; rejects empty pieces and repetitions. `what` is "order" or "token".
std::vector<std::string> split(std::string_view text, std::string_view what) {
  std::vector<std::string> all;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find('-', start), text.size());
    all.emplace_back(text.substr(start, end - start));
    start = end + 1;
  }
  std::vector<std::string> pieces;
  std::string repeated;
  for (const std::string& piece : all) {
    if (std::ranges::find(pieces, piece) != pieces.end()) {
      repeated = piece;
    } else if (!piece.empty()) {
      pieces.push_back(piece);
    }
  }
  const std::string fixed = pieces.empty() ? std::string(kDefaultOrder) : join(pieces, "-");
  const bool has_empty = std::ranges::find(all, std::string()) != all.end();
  MC_REQUIRE(!has_empty, "{} \"{}\" has an empty piece; join axes by single dashes, as in \"{}\"",
             what, text, fixed);
  MC_REQUIRE(repeated.empty(), "{} \"{}\" names axis {} twice; name each axis once, as in \"{}\"",
             what, text, repeated, fixed);
  return pieces;
}

void require_known(std::string_view axis,
                   std::string_view text,
                   std::string_view what,
                   std::span<const std::string> axes) {
  if (std::ranges::find(axes, axis) != axes.end()) {
    return;
  }
  const std::optional<std::string> hint = meant(axis, axes);
  MC_REQUIRE(false, "{} \"{}\" has an unknown axis \"{}\"; the axes are {}{}", what, text, axis,
             join(axes, ", "), hint ? format_text("; did you mean \"{}\"?", *hint) : std::string());
}

// The name under which an order places `axis`: the expert axes stand where the dense ones do.
std::string place_of(const std::string& axis) {
  if (axis == "etp" || axis == "edp") {
    return axis.substr(1);
  }
  return axis;
}

}  // namespace

std::vector<std::string> parse_order(std::string_view order) {
  const std::vector<std::string> axes(kAxes.begin(), kAxes.end());
  std::vector<std::string> pieces = split(order, "order");
  for (const std::string& piece : pieces) {
    require_known(piece, order, "order", axes);
  }
  return pieces;
}

std::vector<std::string> parse_token(std::string_view token, std::span<const AxisSize> layout) {
  std::vector<std::string> axes;
  for (const AxisSize& entry : layout) {
    axes.push_back(entry.axis);
  }
  std::vector<std::string> pieces = split(token, "token");
  for (std::string& piece : pieces) {
    const std::string expert_name = "e" + piece;
    if (std::ranges::find(axes, piece) == axes.end() &&
        std::ranges::find(axes, expert_name) != axes.end()) {
      piece = expert_name;
    }
    require_known(piece, token, "token", axes);
  }
  std::vector<std::string> sorted = pieces;
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  MC_REQUIRE(twice == sorted.end(), "token \"{}\" names axis {} twice, once by its dense name",
             token, *twice);
  return pieces;
}

std::vector<AxisSize> arrange(std::span<const AxisSize> sizes, std::string_view order) {
  const std::vector<std::string> places = parse_order(order);
  for (const AxisSize& entry : sizes) {
    const std::string place = place_of(entry.axis);
    const bool named = std::ranges::find(places, place) != places.end();
    MC_REQUIRE(named || entry.size == 1,
               "order \"{}\" lacks {}, but {} has size {}; add it, as in \"{}-{}\", or set {} to 1",
               order, place, entry.axis, entry.size, order, place, entry.axis);
  }
  std::vector<AxisSize> layout;
  for (const std::string& place : places) {
    for (const AxisSize& entry : sizes) {
      if (place_of(entry.axis) == place) {
        layout.push_back(entry);
      }
    }
  }
  for (const AxisSize& entry : sizes) {
    if (std::ranges::find(places, place_of(entry.axis)) == places.end()) {
      layout.push_back(entry);
    }
  }
  return layout;
}

int64_t product(std::span<const AxisSize> factors) {
  int64_t result = 1;
  for (const AxisSize& factor : factors) {
    result = base::checked_mul(result, factor.size);
  }
  return result;
}

std::string product_text(std::span<const AxisSize> factors) {
  std::vector<std::string> parts;
  for (const AxisSize& factor : factors) {
    parts.push_back(format_text("{} {}", factor.axis, factor.size));
  }
  return format_text("{} = {}", join(parts, " x "), product(factors));
}

}  // namespace megacore::parallel
