// Checks that throw, with the values in the message.
//
//   MC_REQUIRE(size >= 1, "size of axis {} must be at least 1, got {}", axis, size);
//
// MC_REQUIRE checks the caller's input and throws std::invalid_argument (ValueError in Python).
// MC_INVARIANT checks for internal errors and throws std::logic_error (RuntimeError in Python).
// Neither is ever compiled out.

#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace megacore::base {

// Text with one "{}" per part; any other number does not compile.
template <typename... Parts>
struct FormatText {
  consteval FormatText(const char* literal)
      : text(literal) {  // NOLINT(google-explicit-constructor)
    size_t count = 0;
    for (size_t at = text.find("{}"); at != text.npos; at = text.find("{}", at + 2)) {
      ++count;
    }
    if (count != sizeof...(Parts)) {
      throw "the text needs one {} per value";
    }
  }
  std::string_view text;
};

// Puts the parts in the place of "{}": format_text("rank {} of {}", 3, 8) == "rank 3 of 8".
template <typename... Parts>
std::string format_text(FormatText<std::type_identity_t<Parts>...> format_text,
                        const Parts&... parts) {
  std::ostringstream stream;
  std::string_view rest = format_text.text;
  [[maybe_unused]] const auto put = [&](const auto& part) {
    const size_t at = rest.find("{}");
    stream << rest.substr(0, at) << part;
    rest.remove_prefix(at + 2);
  };
  (put(parts), ...);
  stream << rest;
  return stream.str();
}

}  // namespace megacore::base

#define MC_REQUIRE(condition, ...)                                             \
  do {                                                                         \
    if (!(condition)) {                                                        \
      throw std::invalid_argument(::megacore::base::format_text(__VA_ARGS__)); \
    }                                                                          \
  } while (false)

#define MC_INVARIANT(condition, ...)                                                         \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      throw std::logic_error("megacore bug: " + ::megacore::base::format_text(__VA_ARGS__)); \
    }                                                                                        \
  } while (false)
