#include "megacore/pipeline/action.h"

#include <charconv>
#include <optional>

#include "megacore/base/check.h"
#include "megacore/base/text.h"

namespace megacore::pipeline {
namespace {

using base::append_number;
using base::is_digit;

std::optional<ActionKind> find_kind(std::string_view text) {
  for (size_t i = 0; i < kKindText.size(); ++i) {
    if (kKindText[i] == text) return static_cast<ActionKind>(i);
  }
  return std::nullopt;
}

std::optional<int32_t> parse_number(std::string_view digits) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

}  // namespace

void append_text(const Action& action, std::string& text) {
  append_number(action.stage, text);
  text += kKindText[static_cast<size_t>(action.kind)];
  append_number(action.microbatch, text);
}

std::string to_text(const Action& action) {
  std::string text;
  append_text(action, text);
  return text;
}

Action parse_action(std::string_view text) {
  size_t kind_begin = 0;
  while (kind_begin < text.size() && is_digit(text[kind_begin])) ++kind_begin;
  size_t kind_end = kind_begin;
  while (kind_end < text.size() && !is_digit(text[kind_end])) ++kind_end;

  const auto stage = parse_number(text.substr(0, kind_begin));
  const auto kind = find_kind(text.substr(kind_begin, kind_end - kind_begin));
  const auto microbatch = parse_number(text.substr(kind_end));
  MC_REQUIRE(stage && kind && microbatch,
             "'{}' is not an action; an action is <stage><KIND><microbatch> with KIND one of F B I "
             "W SEND_F RECV_F SEND_B RECV_B RECOMPUTE, for example 2F0",
             text);
  return {.stage = *stage, .kind = *kind, .microbatch = *microbatch};
}

}  // namespace megacore::pipeline
