#include "megacore/parallel/host_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "megacore/base/check.h"

namespace megacore::parallel {
namespace {

using base::format_text;

[[noreturn]] void fail(const std::string& what, int64_t bytes, int error) {
  throw std::runtime_error(format_text("cannot {} of {} bytes: {}", what, bytes,
                                       std::generic_category().message(error)));
}

#if defined(__linux__)

// A file descriptor that is closed at the end of the scope.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) {
      close(number_);
    }
  }
  int number() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

std::byte* map(const Descriptor& file, int64_t bytes, int flags) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_SHARED | flags, file.number(), 0);
  if (memory == MAP_FAILED) {
    fail("map a shared-memory segment", bytes, errno);
  }
  return static_cast<std::byte*>(memory);
}

#endif

}  // namespace

#if defined(__linux__)

HostSegment HostSegment::create(int64_t bytes) {
  MC_REQUIRE(bytes >= 1, "a segment of {} bytes; it needs at least 1", bytes);
  Descriptor file(memfd_create("megacore", MFD_CLOEXEC));
  if (file.number() < 0) {
    fail("create a shared-memory segment", bytes, errno);
  }
  const int error = posix_fallocate(file.number(), 0, bytes);
  if (error != 0) {
    fail("reserve a shared-memory segment", bytes, error);
  }
  HostSegment segment(map(file, bytes, MAP_POPULATE), bytes, true);
  segment.file_ = file.release();
  return segment;
}

HostSegment HostSegment::open(int64_t pid, int file_number, int64_t bytes) {
  const std::string name = format_text("/proc/{}/fd/{}", pid, file_number);
  const Descriptor file(::open(name.c_str(), O_RDWR | O_CLOEXEC));
  struct stat info{};
  if (file.number() < 0 || fstat(file.number(), &info) != 0) {
    fail(format_text("open the shared-memory segment {}", name), bytes, errno);
  }
  if (info.st_size != bytes) {
    throw std::runtime_error(format_text("the shared-memory segment {} must have {} bytes, got {}",
                                         name, bytes, info.st_size));
  }
  return {map(file, bytes, 0), bytes, true};
}

#else

HostSegment HostSegment::create(int64_t bytes) {
  fail("create a shared-memory segment", bytes, ENOSYS);
}

HostSegment HostSegment::open(int64_t pid, int, int64_t bytes) {
  fail(format_text("open a shared-memory segment of process {}", pid), bytes, ENOSYS);
}

#endif

HostSegment::HostSegment(HostSegment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      is_mapped_(std::exchange(other.is_mapped_, false)),
      file_(std::exchange(other.file_, -1)) {}

void HostSegment::close_file() {
  if (file_ >= 0) {
    close(std::exchange(file_, -1));
  }
}

HostSegment::~HostSegment() {
  close_file();
  if (is_mapped_) {
    munmap(data_, static_cast<size_t>(bytes_));
  }
}

}  // namespace megacore::parallel
