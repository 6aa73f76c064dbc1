// Locale-independent characters and numbers in text.

#pragma once

#include <charconv>
#include <cstdint>
#include <string>

namespace megacore::base {

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

inline void append_number(int32_t value, std::string& text) {
  char digits[12];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
}

}  // namespace megacore::base
