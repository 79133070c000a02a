// The arithmetic of the retained window and of the ring that stores it: the only place in C++ that
// knows it. Positions count a request's real tokens from 0 (left padding is not counted).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LT_HOST_DEVICE __host__ __device__
#else
#define LT_HOST_DEVICE
#endif

namespace lighttransfer {

// Which keys a query may see (the streaming mask), or which survive a cut (the kept set).
// n_recent < 0: no window, every key. A window with n_recent = 0 holds the sinks alone.
struct RetainedWindow {
  int64_t n_sink;
  int64_t n_recent;

  LT_HOST_DEVICE constexpr bool limited() const { return n_recent >= 0; }

  // Does the query at position t see the key at position j under the streaming mask? n_recent
  // includes the query's own key. Causality is part of it.
  LT_HOST_DEVICE constexpr bool visible(int64_t j, int64_t t) const {
    return j <= t && (!limited() || j < n_sink || j > t - n_recent);
  }

  // First position of the recent part for a sequence of `length` tokens, sinks excluded: the kept
  // set is [0, min(n_sink, length)) together with [recent_begin(length), length).
  LT_HOST_DEVICE constexpr int64_t recent_begin(int64_t length) const {
    const int64_t begin = limited() ? length - n_recent : 0;
    return begin > n_sink ? begin : (n_sink < length ? n_sink : length);
  }

  // Is position j kept when a sequence of `length` tokens is cut to this window?
  LT_HOST_DEVICE constexpr bool kept(int64_t j, int64_t length) const {
    return j < length && (j < n_sink || j >= recent_begin(length));
  }
};

// Where a layer's cache stores a position. n_recent = 0: a full layer, the ring that never wraps.
struct Ring {
  int64_t n_sink;
  int64_t n_recent;

  LT_HOST_DEVICE constexpr bool wraps() const { return n_recent > 0; }

  LT_HOST_DEVICE constexpr int64_t slot(int64_t position) const {
    if (!wraps() || position < n_sink) return position;
    return n_sink + (position - n_sink) % n_recent;
  }

  // Slots in use after `length` tokens.
  LT_HOST_DEVICE constexpr int64_t n_slots(int64_t length) const {
    const int64_t size = n_sink + n_recent;
    return wraps() && length > size ? size : length;
  }

  // The position that `slot` holds after `length` tokens: the largest one below `length` that maps
  // to it. `slot` must be below n_slots(length).
  LT_HOST_DEVICE constexpr int64_t position(int64_t slot, int64_t length) const {
    if (!wraps() || slot < n_sink) return slot;
    return slot + (length - 1 - slot) / n_recent * n_recent;
  }

  // First position still stored after `length` tokens, sinks excluded.
  LT_HOST_DEVICE constexpr int64_t recent_begin(int64_t length) const {
    return RetainedWindow{n_sink, wraps() ? n_recent : -1}.recent_begin(length);
  }
};

}  // namespace lighttransfer
