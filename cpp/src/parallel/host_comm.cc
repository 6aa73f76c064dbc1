#include "megacore/parallel/host_comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "host_meeting.h"
#include "megacore/base/check.h"
#include "megacore/base/intmath.h"
#include "megacore/parallel/host_window.h"

namespace megacore::parallel {
namespace {

// Pieces and slices start at cache lines.
constexpr int64_t kLineBytes = 64;

// Up to this size each member reduces a whole piece for itself: that is cheaper than to meet a
// second time.
constexpr int64_t kReduceAloneBytes = 32 << 10;

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

bool overlap(const std::byte* a, int64_t a_bytes, const std::byte* b, int64_t b_bytes) {
  const std::less<> before;
  return a_bytes > 0 && b_bytes > 0 && before(a, b + b_bytes) && before(b, a + a_bytes);
}

// Calls piece(start, numel) for successive pieces of [0, total), at least once: an empty tensor too
// is a call that members must agree on.
template <typename Piece>
void for_pieces(int64_t total, int64_t piece_numel, const Piece& piece) {
  int64_t start = 0;
  do {
    piece(start, std::min(piece_numel, total - start));
    start += piece_numel;
  } while (start < total);
}

}  // namespace

// One thread at a time, in the process that joined.
class HostComm::Use {
 public:
  explicit Use(HostComm& comm) : comm_(comm) {
    MC_REQUIRE(getpid() == comm.owner_pid_,
               "this communicator belongs to process {}; it cannot be used after a fork",
               comm.owner_pid_);
    MC_REQUIRE(!comm.in_use_.exchange(true),
               "another thread is in a call of this communicator; make one call at a time");
  }
  ~Use() { comm_.in_use_.store(false); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  HostComm& comm_;
};

int64_t HostComm::segment_bytes(int64_t num_members, int64_t slot_bytes) {
  return HostMeeting::front_bytes(num_members) +
         base::checked_mul(2, base::checked_mul(num_members, slot_bytes));
}

HostComm::HostComm(HostSegment segment, HostCommConfig config)
    : segment_(std::move(segment)), config_(std::move(config)), owner_pid_(getpid()) {
  const auto num_members = static_cast<int64_t>(config_.ranks.size());
  MC_REQUIRE(config_.position >= 0 && config_.position < num_members,
             "position must be in [0, {}), got {}", num_members, config_.position);
  const int64_t least = kLineBytes * num_members;
  MC_REQUIRE(config_.slot_bytes >= least && config_.slot_bytes % kLineBytes == 0,
             "slot_bytes must be a multiple of {}, at least {} for {} members, got {}", kLineBytes,
             least, num_members, config_.slot_bytes);
  MC_REQUIRE(config_.timeout_s > 0.0, "timeout_s must be positive, got {}", config_.timeout_s);
  const int64_t needed = segment_bytes(num_members, config_.slot_bytes);
  MC_REQUIRE(segment_.bytes() >= needed, "the segment has {} bytes; the group needs {}",
             segment_.bytes(), needed);
  slots_ = segment_.data() + HostMeeting::front_bytes(num_members);
  meeting_ = std::make_unique<HostMeeting>(segment_.data(), config_);
}

HostComm::~HostComm() {
  if (getpid() == owner_pid_) {  // a forked copy of the object is no member
    meeting_->leave();
  }
}

void HostComm::turn() { ++turns_; }

void HostComm::meet(const HostCall& call, int64_t start) {
  if (start == 0) {
    meeting_->begin(call);
  } else {
    meeting_->meet();
  }
}

std::byte* HostComm::slot(int position) const {
  return slots_ + (2 * position + turns_ % 2) * config_.slot_bytes;
}

void HostComm::check_call(int64_t numel, HostDtype dtype, HostReduction reduction) const {
  MC_REQUIRE(numel >= 0, "numel is {}; it cannot be negative", numel);
  MC_REQUIRE(reduction != HostReduction::kAvg || is_floating_point(dtype),
             "avg needs a floating point type, not {}", name_of(dtype));
}

void HostComm::barrier() {
  const Use use(*this);
  turn();
  meet({.op = HostOp::kBarrier}, 0);
}

void HostComm::all_reduce(std::byte* data,
                          int64_t numel,
                          HostDtype dtype,
                          HostReduction reduction) {
  check_call(numel, dtype, reduction);
  const Use use(*this);
  const HostCall call = {
      .op = HostOp::kAllReduce, .dtype = dtype, .reduction = reduction, .numel = numel};
  const int64_t bytes = bytes_of(dtype);
  for_pieces(numel, config_.slot_bytes / bytes, [&](int64_t start, int64_t piece) {
    turn();
    copy_bytes(my_slot(), data + start * bytes, piece * bytes);
    meet(call, start);
    reduce_piece(data + start * bytes, piece, dtype, reduction);
  });
}

void HostComm::reduce_piece(std::byte* data,
                            int64_t numel,
                            HostDtype dtype,
                            HostReduction reduction) {
  const int64_t bytes = bytes_of(dtype);
  const bool alone = numel * bytes <= kReduceAloneBytes;
  // Each member reduces one slice, the last ones may be shorter or empty.
  const int64_t slice = base::align_up(base::ceil_div(numel, size()), kLineBytes / bytes);
  const auto slice_start = [&](int p) { return alone ? 0 : std::min(numel, p * slice); };
  const auto slice_end = [&](int p) { return alone ? numel : std::min(numel, (p + 1) * slice); };
  const int64_t start = slice_start(position());
  const int64_t end = slice_end(position());
  std::vector<const std::byte*> parts;
  for (int p = 0; p < size(); ++p) {
    parts.push_back(slot(p) + start * bytes);
  }
  reduce_parts({.parts = parts,
                .numel = end - start,
                .dtype = dtype,
                .reduction = reduction,
                .output = data + start * bytes,
                .output_dtype = dtype});
  if (alone) {
    return;
  }
  // Nobody but this member reads this slice of this slot before the second meeting.
  copy_bytes(my_slot() + start * bytes, data + start * bytes, (end - start) * bytes);
  meeting_->meet();
  for (int p = 0; p < size(); ++p) {
    if (p != position()) {
      const int64_t at = slice_start(p) * bytes;
      copy_bytes(data + at, slot(p) + at, slice_end(p) * bytes - at);
    }
  }
}

void HostComm::reduce_scatter(const ReduceScatter& task) {
  check_call(task.numel, task.dtype, task.reduction);
  MC_REQUIRE(can_reduce(task.dtype, task.output_dtype), "a reduction of {} cannot be written as {}",
             name_of(task.dtype), name_of(task.output_dtype));
  const Use use(*this);
  const int64_t slice_bytes = task.numel * bytes_of(task.dtype);
  const int64_t output_bytes = task.numel * bytes_of(task.output_dtype);
  // Output over a slice of the input is safe: what a piece overwrites was sent before. Any other
  // overlap is not.
  const bool is_slice = task.dtype == task.output_dtype && slice_bytes > 0 &&
                        (task.output - task.input) % slice_bytes == 0;
  if (is_slice || !overlap(task.output, output_bytes, task.input, size() * slice_bytes)) {
    reduce_scatter_pieces(task);
    return;
  }
  std::vector<std::byte> aside(static_cast<size_t>(output_bytes));
  ReduceScatter task_aside = task;
  task_aside.output = aside.data();
  reduce_scatter_pieces(task_aside);
  copy_bytes(task.output, aside.data(), output_bytes);
}

void HostComm::reduce_scatter_pieces(const ReduceScatter& task) {
  const HostCall call = {.op = HostOp::kReduceScatter,
                         .dtype = task.dtype,
                         .reduction = task.reduction,
                         .numel = task.numel};
  const int64_t bytes = bytes_of(task.dtype);
  // A slot holds one part for each member.
  const int64_t part_numel = config_.slot_bytes / size() / kLineBytes * kLineBytes / bytes;
  const auto own_part = [&](int p, int64_t start) {
    return task.input + (p * task.numel + start) * bytes;
  };
  std::vector<const std::byte*> parts(static_cast<size_t>(size()));
  for_pieces(task.numel, part_numel, [&](int64_t start, int64_t piece) {
    turn();
    for (int p = 0; p < size(); ++p) {
      if (p != position()) {
        copy_bytes(my_slot() + p * part_numel * bytes, own_part(p, start), piece * bytes);
      }
    }
    meet(call, start);
    for (int p = 0; p < size(); ++p) {
      parts[static_cast<size_t>(p)] =
          p == position() ? own_part(p, start) : slot(p) + position() * part_numel * bytes;
    }
    reduce_parts({.parts = parts,
                  .numel = piece,
                  .dtype = task.dtype,
                  .reduction = task.reduction,
                  .output = task.output + start * bytes_of(task.output_dtype),
                  .output_dtype = task.output_dtype});
  });
}

void HostComm::all_gather(std::byte* output,
                          const std::byte* input,
                          int64_t numel,
                          HostDtype dtype) {
  check_call(numel, dtype, HostReduction::kSum);
  const int64_t bytes = bytes_of(dtype);
  std::byte* const own_place = output + position() * numel * bytes;
  std::vector<std::byte> aside;
  if (input != own_place && overlap(input, numel * bytes, output, size() * numel * bytes)) {
    aside.assign(input, input + numel * bytes);
    input = aside.data();
  }
  const Use use(*this);
  const HostCall call = {.op = HostOp::kAllGather, .dtype = dtype, .numel = numel};
  for_pieces(numel, config_.slot_bytes / bytes, [&](int64_t start, int64_t piece) {
    turn();
    copy_bytes(my_slot(), input + start * bytes, piece * bytes);
    meet(call, start);
    copy_bytes(own_place + start * bytes, input + start * bytes, piece * bytes);
    for (int p = 0; p < size(); ++p) {
      if (p != position()) {
        copy_bytes(output + (p * numel + start) * bytes, slot(p), piece * bytes);
      }
    }
  });
}

void HostComm::broadcast(std::byte* data, int64_t numel, HostDtype dtype, int source) {
  check_call(numel, dtype, HostReduction::kSum);
  MC_REQUIRE(source >= 0 && source < size(), "source must be in [0, {}), got {}", size(), source);
  const Use use(*this);
  const HostCall call = {
      .op = HostOp::kBroadcast, .dtype = dtype, .source = source, .numel = numel};
  const int64_t bytes = bytes_of(dtype);
  for_pieces(numel, config_.slot_bytes / bytes, [&](int64_t start, int64_t piece) {
    turn();
    if (position() == source) {
      copy_bytes(my_slot(), data + start * bytes, piece * bytes);
    }
    meet(call, start);
    if (position() != source) {
      copy_bytes(data + start * bytes, slot(source), piece * bytes);
    }
  });
}

std::unique_ptr<HostWindow> HostComm::make_window(int64_t bytes, int64_t num_parts) {
  const int64_t segment_bytes = HostWindow::segment_bytes(bytes, num_parts);
  std::optional<HostSegment> own;
  try {
    own.emplace(HostSegment::create(segment_bytes));
  } catch (const std::runtime_error&) {  // no memory, or no Linux: told to the others below
  }
  struct Place {
    int64_t pid;
    int64_t file;
  };
  const Place mine = {owner_pid_, own ? own->file() : -1};
  std::vector<Place> places(config_.ranks.size());
  all_gather(reinterpret_cast<std::byte*>(places.data()), reinterpret_cast<const std::byte*>(&mine),
             2, HostDtype::kInt64);
  std::vector<HostSegment> segments;
  int64_t failed = own ? 0 : 1;
  try {
    for (int p = 0; p < size(); ++p) {
      const Place& place = places[static_cast<size_t>(p)];
      if (place.file >= 0 && failed == 0 && p != position()) {
        segments.push_back(
            HostSegment::open(place.pid, static_cast<int>(place.file), segment_bytes));
      } else if (failed == 0 && p == position()) {
        segments.push_back(std::move(*own));
      }
      failed |= place.file < 0 ? 1 : 0;
    }
  } catch (const std::runtime_error&) {
    failed = 1;
  }
  // Also tells that everyone has opened what it could: files may be closed.
  all_reduce(reinterpret_cast<std::byte*>(&failed), 1, HostDtype::kInt64, HostReduction::kMax);
  if (failed != 0) {
    return nullptr;
  }
  for (HostSegment& segment : segments) {
    segment.close_file();
  }
  return std::make_unique<HostWindow>(std::move(segments), num_parts, config_);
}

}  // namespace megacore::parallel
