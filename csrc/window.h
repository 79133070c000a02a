// The arithmetic of the retained window and of the ring that stores it: the only place in C++ that
// knows it. Positions count a request's real tokens from 0 (left padding is not counted).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LT_HOST_DEVICE __host__ __device__
#else
// Files compiled for wide registers must not emit functions that others share.
#define LT_HOST_DEVICE __attribute__((always_inline))
#endif

namespace lighttransfer {

// The positions of a run of tokens that a ring still stores when the run ends: [begin, sink_end)
// and [recent_begin, end).
struct KeptPositions {
  int64_t begin, sink_end, recent_begin, end;

  LT_HOST_DEVICE constexpr int64_t size() const { return sink_end - begin + (end - recent_begin); }

  // The i-th of them, in order.
  LT_HOST_DEVICE constexpr int64_t operator[](int64_t i) const {
    const int64_t n_sink = sink_end - begin;
    return i < n_sink ? begin + i : recent_begin + (i - n_sink);
  }

  // How many of them lie below `bound`, which is at most `end`.
  LT_HOST_DEVICE constexpr int64_t size_below(int64_t bound) const {
    const int64_t sinks = (bound < sink_end ? bound : sink_end) - begin;
    return (sinks > 0 ? sinks : 0) + (bound > recent_begin ? bound - recent_begin : 0);
  }

  // How many of them, from the i-th on, are consecutive.
  LT_HOST_DEVICE constexpr int64_t run(int64_t i) const {
    const int64_t n_sink = sink_end - begin;
    return i < n_sink ? n_sink - i : size() - i;
  }
};

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

  // What of the positions [begin, end) is kept when a sequence of `end` tokens is cut to this
  // window.
  LT_HOST_DEVICE constexpr KeptPositions kept_positions(int64_t begin, int64_t end) const {
    const int64_t recent = recent_begin(end);
    const int64_t sink_end = n_sink < end ? n_sink : end;
    return {begin, sink_end > begin ? sink_end : begin, recent > begin ? recent : begin, end};
  }
};

// Where a layer's cache stores a position. n_recent = 0: a full layer, the ring that never wraps.
// Int: int64_t, or uint32_t in kernels whose registers are 32 bits wide (sums of two int32 fit).
template <class Int>
struct RingOf {
  Int n_sink;
  Int n_recent;

  LT_HOST_DEVICE constexpr bool wraps() const { return n_recent > 0; }

  LT_HOST_DEVICE constexpr Int slot(Int position) const {
    if (!wraps() || position < n_sink) return position;
    return n_sink + (position - n_sink) % n_recent;
  }

  // Have the first of `length` tokens beyond the sinks been overwritten? Until then a token's slot
  // is its position.
  LT_HOST_DEVICE constexpr bool wrapped(Int length) const {
    return wraps() && length > n_sink + n_recent;
  }

  // Slots in use after `length` tokens.
  LT_HOST_DEVICE constexpr Int n_slots(Int length) const {
    return wrapped(length) ? n_sink + n_recent : length;
  }

  // The position that `slot` holds after `length` tokens: the largest one below `length` that maps
  // to it. `slot` must be below n_slots(length).
  LT_HOST_DEVICE constexpr Int position(Int slot, Int length) const {
    if (!wraps() || slot < n_sink) return slot;
    return slot + (length - 1 - slot) / n_recent * n_recent;
  }

  // The kept set that the ring stores.
  LT_HOST_DEVICE constexpr RetainedWindow window() const {
    return {n_sink, wraps() ? n_recent : -1};
  }

  // First position still stored after `length` tokens, sinks excluded.
  LT_HOST_DEVICE constexpr int64_t recent_begin(int64_t length) const {
    return window().recent_begin(length);
  }

  // What of the positions [begin, end) is stored once the sequence ends at `end`: the whole cache
  // for begin = 0, else what a chunk must write.
  LT_HOST_DEVICE constexpr KeptPositions kept(int64_t begin, int64_t end) const {
    return window().kept_positions(begin, end);
  }

  // How many positions, this one included, follow each other in memory before the ring wraps.
  LT_HOST_DEVICE constexpr int64_t run(int64_t position) const {
    return wraps() ? n_sink + n_recent - slot(position) : INT64_MAX;
  }

  // Compaction moves the positions [move_begin(length), length) from the slot of their position to
  // their ring slot; the other kept ones are in place. Every source lies at or above
  // n_sink + n_recent, every destination below it and in the place of an evicted token: no move
  // reads what another one writes.
  LT_HOST_DEVICE constexpr int64_t move_begin(int64_t length) const {
    if (!wraps() || length <= n_sink + n_recent) return length;
    const int64_t begin = recent_begin(length);
    return begin > n_sink + n_recent ? begin : n_sink + n_recent;
  }
};
using Ring = RingOf<int64_t>;

}  // namespace lighttransfer
