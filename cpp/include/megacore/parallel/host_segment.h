// Memory shared by several processes of one host.
//
// One process creates a segment, the others open it by that process's id and file number. The
// memory has no name in any file system: it is freed when the last process has closed it or died,
// so nothing remains however a process ends, and the size of /dev/shm is no limit. Linux only:
// elsewhere `create` and `open` throw.

#pragma once

#include <cstddef>
#include <cstdint>

namespace megacore::parallel {

class HostSegment {
 public:
  // New memory, all zero. It is reserved at once, so that a lack of memory is an error here and not
  // a SIGBUS later. Others can open it until close_file().
  // REQUIRES: bytes >= 1.
  // Throws std::runtime_error with the system's reason.
  static HostSegment create(int64_t bytes);

  // The memory with file number `file` of process `pid`. Throws std::runtime_error if it does not
  // exist, has another size, or is not accessible.
  static HostSegment open(int64_t pid, int file, int64_t bytes);

  // Memory of the caller, for members that are threads of one process. Not freed.
  static HostSegment over(std::byte* data, int64_t bytes) { return {data, bytes, false}; }

  HostSegment(HostSegment&& other) noexcept;
  HostSegment& operator=(HostSegment&&) = delete;
  ~HostSegment();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int file() const { return file_; }  // -1 if there is none (any more)
  void close_file();

 private:
  HostSegment(std::byte* data, int64_t bytes, bool is_mapped)
      : data_(data), bytes_(bytes), is_mapped_(is_mapped) {}

  std::byte* data_;
  int64_t bytes_;
  bool is_mapped_;
  int file_ = -1;
};

}  // namespace megacore::parallel
