#include "megacore/pipeline/partition.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>

#include "megacore/base/check.h"
#include "megacore/pipeline/layer_layout.h"

namespace megacore::pipeline {
namespace {

using base::format_text;

constexpr int kMaxSize = 1 << 14;  // keeps products in int, and the search for legal values short

// Either the number of layers of each stage, or the rule that fails.
struct Attempt {
  std::vector<int> layers;
  std::string failure;
};

Attempt fail(std::string failure) { return {.layers = {}, .failure = std::move(failure)}; }

std::string per_chunk(int num_chunks) {
  return num_chunks > 1 ? format_text(", {} chunks each", num_chunks) : std::string();
}

Attempt split_evenly(const PartitionShape& s) {
  const int num_stages = s.num_ranks * s.num_chunks;
  const int units = s.num_layers + (s.account_for_embedding ? 1 : 0) + (s.account_for_loss ? 1 : 0);
  if (units % num_stages != 0 || units < num_stages) {
    std::string what = format_text("num_layers {}", s.num_layers);
    if (s.account_for_embedding) what += " + 1 for the embedding";
    if (s.account_for_loss) what += " + 1 for the loss";
    return fail(format_text("{} cannot be spread evenly over {} stages ({} ranks{})", what,
                            num_stages, s.num_ranks, per_chunk(s.num_chunks)));
  }
  Attempt attempt{.layers = std::vector<int>(static_cast<size_t>(num_stages), units / num_stages),
                  .failure = {}};
  if (s.account_for_embedding) --attempt.layers.front();
  if (s.account_for_loss) --attempt.layers.back();
  if (attempt.layers.front() < 0) return fail("one stage holds embedding and loss but no layer");
  return attempt;
}

std::string check_end(const char* name, std::optional<int> layers, int num_chunks) {
  if (!layers) return {};
  if (*layers < 1) return format_text("{} is {}; that rank needs at least 1 layer", name, *layers);
  if (*layers % num_chunks != 0) {
    return format_text("{} is {}, which its {} chunks cannot share evenly", name, *layers,
                       num_chunks);
  }
  return {};
}

Attempt split_around_ends(const PartitionShape& s) {
  if (s.account_for_embedding || s.account_for_loss) {
    return fail("first and last cannot be combined with account_for_embedding or account_for_loss");
  }
  for (const std::string& failure :
       {check_end("first", s.first, s.num_chunks), check_end("last", s.last, s.num_chunks)}) {
    if (!failure.empty()) return fail(failure);
  }
  const int given = s.first.value_or(0) + s.last.value_or(0);
  const int other_ranks = s.num_ranks - (s.first ? 1 : 0) - (s.last ? 1 : 0);
  if (other_ranks < 0)
    return fail("with 1 rank, first and last are the same rank; leave one of them out");
  const int rest = s.num_layers - given;
  if (other_ranks == 0 && rest != 0) {
    return fail(
        format_text("num_layers is {}, but first and last make {} and no other rank is left",
                    s.num_layers, given));
  }
  const int other_stages = other_ranks * s.num_chunks;
  if (other_ranks > 0 && (rest < other_stages || rest % other_stages != 0)) {
    return fail(format_text(
        "of num_layers {}, first and last take {}; the other {} cannot be spread evenly "
        "over {} stages ({} ranks{})",
        s.num_layers, given, rest, other_stages, other_ranks, per_chunk(s.num_chunks)));
  }
  Attempt attempt;
  for (int chunk = 0; chunk < s.num_chunks; ++chunk) {
    for (int position = 0; position < s.num_ranks; ++position) {
      const int rank = s.is_v && chunk == 1 ? s.num_ranks - 1 - position : position;
      const bool is_first = rank == 0 && s.first;
      const bool is_last = rank == s.num_ranks - 1 && s.last;
      attempt.layers.push_back(is_first  ? *s.first / s.num_chunks
                               : is_last ? *s.last / s.num_chunks
                                         : rest / other_stages);
    }
  }
  return attempt;
}

Attempt attempt_split(const PartitionShape& s) {
  return s.first || s.last ? split_around_ends(s) : split_evenly(s);
}

// The legal values of one setting nearest to its present one, as "num_layers 28 or 32", or empty.
// `with(value)` is the shape with that setting changed.
template <typename With>
std::string nearest(const char* name, int value, int limit, const With& with) {
  const auto legal = [&](int candidate) { return attempt_split(with(candidate)).failure.empty(); };
  int below = value - 1;
  while (below >= 1 && !legal(below)) --below;
  int above = std::max(value + 1, 1);
  while (above <= limit && !legal(above)) ++above;
  if (below < 1 && above > limit) return {};
  if (below < 1) return format_text("; {} {}", name, above);
  if (above > limit) return format_text("; {} {}", name, below);
  return format_text("; {} {} or {}", name, below, above);
}

std::string nearest_settings(const PartitionShape& s) {
  std::string text;
  const int num_stages = s.num_ranks * s.num_chunks;
  const int enough = s.num_layers + s.first.value_or(0) + s.last.value_or(0) + num_stages;
  text += nearest("num_layers", s.num_layers, std::min(enough, kMaxSize), [&](int value) {
    PartitionShape other = s;
    other.num_layers = value;
    return other;
  });
  text += nearest("num_ranks", s.num_ranks, s.num_layers + 2, [&](int value) {
    PartitionShape other = s;
    other.num_ranks = value;
    return other;
  });
  if (s.num_chunks > 1 && !s.is_v) {
    text += nearest("num_chunks", s.num_chunks, s.num_layers + 2, [&](int value) {
      PartitionShape other = s;
      other.num_chunks = value;
      return other;
    });
  }
  if (s.first) {
    text += nearest("first", *s.first, s.num_layers, [&](int value) {
      PartitionShape other = s;
      other.first = value;
      return other;
    });
  }
  if (s.last) {
    text += nearest("last", *s.last, s.num_layers, [&](int value) {
      PartitionShape other = s;
      other.last = value;
      return other;
    });
  }
  if (!text.empty()) return ". Nearest legal values, changing one setting: " + text.substr(2);

  // Several settings are wrong at once: say what works when the special ones are left out.
  const auto even = [&](int value) {
    return PartitionShape{
        .num_layers = value, .num_ranks = s.num_ranks, .num_chunks = s.num_chunks};
  };
  const std::string without = ". No single change helps; without first, last and account_for_*, ";
  if (attempt_split(even(s.num_layers)).failure.empty()) return without + "these sizes are legal";
  const std::string layers = nearest("num_layers", s.num_layers, s.num_layers + num_stages, even);
  return without + "nearest legal: " + layers.substr(2);
}

std::string counted(int count, const char* noun) {
  return format_text("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::vector<int> split_by_layout(const PartitionShape& s) {
  MC_REQUIRE(!s.first && !s.last && !s.account_for_embedding && !s.account_for_loss,
             "layout says where every layer goes; leave out first, last and account_for_*");
  std::vector<int> layers = layers_of_layout(*s.layout);
  const int num_stages = s.num_ranks * s.num_chunks;
  const int found = static_cast<int>(layers.size());
  if (found != num_stages) {
    const std::string chunks =
        found % s.num_ranks == 0
            ? format_text("; with {} chunks per rank it would fit", found / s.num_ranks)
            : std::string();
    throw std::invalid_argument(format_text("layout \"{}\" has {}, but {}{} make {}{}", *s.layout,
                                            counted(found, "stage"), counted(s.num_ranks, "rank"),
                                            per_chunk(s.num_chunks), num_stages, chunks));
  }
  const int total = std::accumulate(layers.begin(), layers.end(), 0);
  MC_REQUIRE(total == s.num_layers,
             "layout \"{}\" has {} (t), but num_layers is {}{}{}, or set num_layers to {}",
             *s.layout, counted(total, "layer"), s.num_layers,
             total < s.num_layers ? "; add " : "; take away ", std::abs(s.num_layers - total),
             total);
  return layers;
}

void check_sizes(const PartitionShape& shape) {
  MC_REQUIRE(shape.num_layers >= 1 && shape.num_layers <= kMaxSize,
             "num_layers must be in 1..{}, got {}", kMaxSize, shape.num_layers);
  MC_REQUIRE(shape.num_ranks >= 1 && shape.num_ranks <= kMaxSize,
             "num_ranks must be in 1..{}, got {}", kMaxSize, shape.num_ranks);
  MC_REQUIRE(shape.num_chunks >= 1 && shape.num_chunks <= kMaxSize,
             "num_chunks must be in 1..{}, got {}", kMaxSize, shape.num_chunks);
  MC_REQUIRE(!shape.is_v || shape.num_chunks == 2, "a V has 2 chunks per rank, not {}",
             shape.num_chunks);
}

}  // namespace

std::vector<LayerRange> partition_layers(const PartitionShape& shape) {
  check_sizes(shape);
  std::vector<int> layers_of_stage;
  if (shape.layout) {
    layers_of_stage = split_by_layout(shape);
  } else {
    Attempt attempt = attempt_split(shape);
    MC_REQUIRE(attempt.failure.empty(), "{}{}", attempt.failure, nearest_settings(shape));
    layers_of_stage = std::move(attempt.layers);
  }
  std::vector<LayerRange> ranges;
  int begin = 0;
  for (const int layers : layers_of_stage) {
    ranges.push_back({begin, begin + layers});
    begin += layers;
  }
  MC_INVARIANT(begin == shape.num_layers, "the stages hold {} layers, not {}", begin,
               shape.num_layers);
  return ranges;
}

}  // namespace megacore::pipeline
