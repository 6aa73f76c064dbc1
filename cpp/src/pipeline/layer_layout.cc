#include "megacore/pipeline/layer_layout.h"

#include <string>

#include "megacore/base/check.h"
#include "megacore/base/text.h"

namespace megacore::pipeline {
namespace {

using base::format_text;
using base::is_digit;

constexpr size_t kMaxSymbols = 1 << 16;  // after repetition
constexpr int kMaxDepth = 64;            // of groups in groups

// One character of the layout after repetition, and where in the text it stands.
struct Symbol {
  char kind;
  size_t position;
};

using Symbols = std::vector<Symbol>;

// Recursive descent: sequence = { item [ '*' number ] }, item = symbol | '(' sequence ')'.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Symbols parse() {
    Symbols symbols = sequence(0);
    if (!at_end()) fail(position_, "this ')' closes no '('");
    return symbols;
  }

  [[noreturn]] void fail(size_t position, std::string_view problem) const {
    const std::string before(text_.substr(0, position));
    const std::string after(position < text_.size() ? text_.substr(position + 1) : "");
    const std::string here(position < text_.size() ? text_.substr(position, 1) : "");
    throw std::invalid_argument(
        format_text("layout \"{}>{}<{}\": {}", before, here, after, problem));
  }

 private:
  Symbols sequence(int depth) {
    Symbols symbols;
    for (skip_blanks(); !at_end() && text_[position_] != ')'; skip_blanks()) {
      const size_t start = position_;
      const Symbols part = repeat(item(depth), start);
      if (symbols.size() + part.size() > kMaxSymbols) {
        fail(start,
             format_text("with this there are more than {} layers and separators", kMaxSymbols));
      }
      symbols.insert(symbols.end(), part.begin(), part.end());
    }
    return symbols;
  }

  Symbols item(int depth) {
    const size_t start = position_++;
    const char kind = text_[start];
    if (kind != '(') {
      if (std::string_view("EtmL|").find(kind) == std::string_view::npos) {
        fail(start, kind == '*' ? "'*' must follow what it repeats"
                                : "unknown; use E (embedding), t (layer), m (layer for multi-token "
                                  "prediction), L (loss), | (next stage), "
                                  "x*3 and ( )");
      }
      return {{kind, start}};
    }
    if (depth == kMaxDepth) fail(start, format_text("groups may be nested {} deep", kMaxDepth));
    Symbols group = sequence(depth + 1);
    if (at_end()) fail(start, "this '(' is not closed");
    ++position_;
    return group;
  }

  // The part as often as the text at the present position says.
  Symbols repeat(Symbols part, size_t start) {
    skip_blanks();
    if (at_end() || text_[position_] != '*') return part;
    const size_t star = position_++;
    skip_blanks();
    if (at_end() || !is_digit(text_[position_])) fail(star, "a number must follow '*'");
    size_t count = 0;
    for (; !at_end() && is_digit(text_[position_]); ++position_) {
      count = count * 10 + static_cast<size_t>(text_[position_] - '0');
      if (count > kMaxSymbols) fail(position_, format_text("repeat at most {} times", kMaxSymbols));
    }
    if (count == 0) fail(star, "repeat at least once");
    if (part.size() * count > kMaxSymbols) {
      fail(start,
           format_text("with this there are more than {} layers and separators", kMaxSymbols));
    }
    const size_t size = part.size();
    part.reserve(size * count);
    for (size_t k = size; k < size * count; ++k) part.push_back(part[k - size]);
    return part;
  }

  void skip_blanks() {
    while (!at_end() && std::string_view(", \t\n").find(text_[position_]) != std::string_view::npos)
      ++position_;
  }
  bool at_end() const { return position_ == text_.size(); }

  std::string_view text_;
  size_t position_ = 0;
};

// All m on one stage, behind the last t.
void check_predictions(const Symbols& symbols, const Parser& parser) {
  bool found = false;
  bool same_stage = true;
  for (const Symbol& symbol : symbols) {
    if (symbol.kind == '|') same_stage = !found;
    if (symbol.kind == 't' && found) {
      parser.fail(symbol.position, "t may not stand behind m, which predicts from the last layer");
    }
    if (symbol.kind == 'm' && found && !same_stage) {
      parser.fail(symbol.position, "all m must be on one stage");
    }
    found = found || symbol.kind == 'm';
  }
}

// E first and once, L last and once.
void check_order(const Symbols& symbols, const Parser& parser, size_t text_size) {
  if (symbols.empty()) parser.fail(text_size, "it is empty; the shortest is \"EtL\"");
  if (symbols.front().kind != 'E') {
    parser.fail(symbols.front().position, "a layout begins with E, the embedding");
  }
  if (symbols.back().kind != 'L') {
    parser.fail(symbols.back().position, "a layout ends with L, the output layer and loss");
  }
  for (size_t k = 1; k + 1 < symbols.size(); ++k) {
    if (symbols[k].kind == 'E') {
      parser.fail(symbols[k].position, "E may stand at the very start only, once");
    }
    if (symbols[k].kind == 'L') {
      parser.fail(symbols[k].position, "L may stand at the very end only, once");
    }
  }
}

// How often a symbol occurs on each stage.
std::vector<int> count_on_stages(std::string_view text, char kind) {
  Parser parser(text);
  const Symbols symbols = parser.parse();
  check_order(symbols, parser, text.size());
  check_predictions(symbols, parser);
  std::vector<int> counts = {0};
  for (const Symbol& symbol : symbols) {
    if (symbol.kind == '|') counts.push_back(0);
    if (symbol.kind == kind) ++counts.back();
  }
  return counts;
}

}  // namespace

std::vector<int> layers_of_layout(std::string_view text) { return count_on_stages(text, 't'); }

std::vector<int> predictions_of_layout(std::string_view text) { return count_on_stages(text, 'm'); }

}  // namespace megacore::pipeline
