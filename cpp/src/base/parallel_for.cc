#include "megacore/base/parallel_for.h"

#include <dlfcn.h>

#include <string_view>
#include <thread>
#include <vector>

#ifdef __linux__
#include <link.h>
#endif

namespace megacore::base {
namespace {

// Entry point of GNU's OpenMP, which those of LLVM and Intel have too.
using Parallel = void (*)(void (*)(void*), void*, unsigned num_threads, unsigned flags);

#ifdef __linux__
// Looks for the function in a loaded library; nonzero ends the search.
int look_in(dl_phdr_info* library, size_t /*size*/, void* found) {
  const std::string_view path = library->dlpi_name;
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (!name.starts_with("libgomp") && !name.starts_with("libiomp5") &&
      !name.starts_with("libomp")) {
    return 0;
  }
  // Torch loads it for itself only, so its symbols are not visible to other libraries.
  void* handle = dlopen(library->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  void* function = handle == nullptr ? nullptr : dlsym(handle, "GOMP_parallel");
  *static_cast<Parallel*>(found) = reinterpret_cast<Parallel>(function);
  return function == nullptr ? 0 : 1;
}

Parallel find_parallel() {
  Parallel found = nullptr;
  dl_iterate_phdr(look_in, static_cast<void*>(&found));
  return found;
}
#else
Parallel find_parallel() { return nullptr; }
#endif

}  // namespace

void run_team(int num_threads, void (*work)(void*), void* data) {
  if (num_threads == 1) {
    work(data);
    return;
  }
  static const Parallel parallel = find_parallel();
  if (parallel != nullptr) {
    // Always the full team: GNU's runtime ends the threads that a smaller one does not need.
    parallel(work, data, static_cast<unsigned>(num_threads), 0);
    return;
  }
  std::vector<std::jthread> helpers;
  for (int i = 1; i < num_threads; ++i) {
    helpers.emplace_back(work, data);
  }
  work(data);
}

}  // namespace megacore::base
