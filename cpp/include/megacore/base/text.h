// Locale-independent characters and numbers in text, and lists.

#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

namespace megacore::base {

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

inline void append_number(int32_t value, std::string& text) {
  char digits[12];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
}

// The texts of items with a separator between them.
template <typename Items, typename Text>
std::string join(const Items& items, std::string_view separator, const Text& text_of) {
  std::string joined;
  for (const auto& item : items) {
    joined += joined.empty() ? std::string_view() : separator;
    joined += text_of(item);
  }
  return joined;
}

}  // namespace megacore::base
