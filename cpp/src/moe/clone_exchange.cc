#include "megacore/moe/clone_exchange.h"

#include <cstring>

#include "megacore/base/check.h"

namespace megacore::moe {
namespace {

using parallel::HostDtype;

constexpr int64_t kOpened = 0;
int64_t weights_part(int64_t projection) { return 1 + projection; }
int64_t grads_part(int64_t projection) { return 1 + kProjections + projection; }

template <typename Float>
void add(std::byte* total, const std::byte* grads, int64_t bytes) {
  auto* sums = reinterpret_cast<Float*>(total);
  const auto* values = reinterpret_cast<const Float*>(grads);
  for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(Float)); ++i) {
    sums[i] += values[i];
  }
}

}  // namespace

CloneExchange::CloneExchange(parallel::HostWindow& window, const CloneLayout& layout)
    : window_(window), layout_(layout) {
  MC_REQUIRE(window.num_parts() >= kWindowParts && window.bytes() >= layout.bytes(window.size()),
             "the window has {} parts and {} bytes; clones need {} and {}", window.num_parts(),
             window.bytes(), kWindowParts, layout.bytes(window.size()));
}

std::byte* CloneExchange::weights(int position, int64_t projection) const {
  return window_.data(position) + layout_.weights_offset(window_.size(), projection);
}

std::byte* CloneExchange::grads(int position, int64_t projection) const {
  return window_.data(position) + layout_.grads_offset(window_.size(), projection);
}

void CloneExchange::check(const CloneTable& table) const {
  MC_REQUIRE(
      table.num_ranks == window_.size() && table.position == window_.position() &&
          table.num_slots == layout_.num_slots && table.num_experts >= table.num_ranks &&
          table.num_experts % table.num_ranks == 0,
      "a table of {} ranks with {} slots and {} experts does not fit memory for {} ranks with {}",
      table.num_ranks, table.num_slots, table.num_experts, window_.size(), layout_.num_slots);
}

void CloneExchange::open() {
  window_.offer(kOpened);
  is_opening_ = true;
}

void CloneExchange::push(int64_t projection, const std::byte* weights, const CloneTable& table) {
  require_projection(projection);
  check(table);
  if (is_opening_) {
    window_.wait_until_offered(kOpened);
    window_.take(kOpened);
    is_opening_ = false;
  }
  const int64_t bytes = layout_.weight_bytes[projection];
  for (int64_t index = 0; index < table.num_ranks * table.num_slots; ++index) {
    const int64_t expert = table.my_expert(index);
    if (expert >= 0 && bytes > 0) {
      std::memcpy(this->weights(static_cast<int>(index / table.num_slots), projection) +
                      index % table.num_slots * bytes,
                  weights + expert * bytes, static_cast<size_t>(bytes));
    }
  }
  window_.offer(weights_part(projection));
}

void CloneExchange::wait_for_weights(int64_t projection) {
  require_projection(projection);
  window_.wait_until_offered(weights_part(projection));
}

void CloneExchange::reserve_grads(int64_t projection) {
  require_projection(projection);
  window_.wait_until_taken(grads_part(projection));
}

void CloneExchange::offer_grads(int64_t projection) {
  require_projection(projection);
  window_.offer(grads_part(projection));
}

void CloneExchange::collect(int64_t projection,
                            HostDtype dtype,
                            std::byte* total,
                            const CloneTable& table) {
  require_projection(projection);
  check(table);
  MC_REQUIRE(dtype == HostDtype::kFloat32 || dtype == HostDtype::kFloat64,
             "gradients of clones are float32 or float64, not {}", parallel::name_of(dtype));
  window_.wait_until_offered(grads_part(projection));
  const int64_t bytes = layout_.grad_bytes[projection];
  for (int64_t index = 0; index < table.num_ranks * table.num_slots; ++index) {
    const int64_t expert = table.my_expert(index);
    if (expert >= 0) {
      const std::byte* values = grads(static_cast<int>(index / table.num_slots), projection) +
                                index % table.num_slots * bytes;
      if (dtype == HostDtype::kFloat32) {
        add<float>(total + expert * bytes, values, bytes);
      } else {
        add<double>(total + expert * bytes, values, bytes);
      }
    }
  }
  window_.take(grads_part(projection));
}

}  // namespace megacore::moe
