// Loops over torch's own thread pool.
#pragma once

#include <cstdint>

namespace lighttransfer::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// Runs function on disjoint ranges that cover [begin, end); a range is at least `grain` long where
// it can be. An exception in a range reaches the caller.
void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context);

int64_t n_threads();

// body(begin, end). Not a torch template: files compiled for wide registers must not emit inline
// functions that others share.
template <class Body>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  parallel_for(
      begin, end, grain,
      [](int64_t b, int64_t e, void* context) { (*static_cast<const Body*>(context))(b, e); },
      const_cast<Body*>(&body));
}

}  // namespace lighttransfer::cpu
