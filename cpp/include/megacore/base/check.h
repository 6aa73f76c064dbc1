// Checks that throw, with the values in the message.
//
//   MC_REQUIRE(size >= 1, "size of axis ", axis, " is ", size, "; it must be at least 1");
//
// MC_REQUIRE checks the caller's input and throws std::invalid_argument (ValueError in Python).
// MC_INVARIANT checks for internal errors and throws std::logic_error (RuntimeError in Python).
// Neither is ever compiled out.

#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace megacore::base {

// Concatenates all parts into one string: concat("rank ", 3, " of ", 8) == "rank 3 of 8".
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace megacore::base

#define MC_REQUIRE(condition, ...)                                        \
  do {                                                                    \
    if (!(condition)) {                                                   \
      throw std::invalid_argument(::megacore::base::concat(__VA_ARGS__)); \
    }                                                                     \
  } while (false)

#define MC_INVARIANT(condition, ...)                                                   \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      throw std::logic_error(::megacore::base::concat("megacore bug: ", __VA_ARGS__)); \
    }                                                                                  \
  } while (false)
