// The shadow of a CTA's shared memory: who wrote and read each granule, and when, by vector clocks.
//
// Time counts the CTA's synchronisation events. Every access is tagged with (time, warp, lane). A
// warp knows, of every warp u (itself included), the time up to which u's accesses happened before
// it: barriers join that knowledge. An access is a race if it meets a conflicting access that its
// warp does not know of, whatever order the simulator ran them in. Time goes on from CTA to CTA, so
// the tags of an earlier CTA read as "never written" and nothing needs clearing.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace cudasim {

struct Warp;
struct Cta;

class SharedShadow {
 public:
  void begin_cta(Cta& cta, int warps, int64_t bytes, int granule_shift);

  // Offsets are relative to the CTA's shared memory, one a lane; all lie inside. Each returns the
  // lanes that met a finding.
  uint32_t read(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes, bool collective);
  uint32_t write(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes,
                 const uint8_t* const* data);
  uint32_t atomic(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes);
  // A cp.async: the granules are in flight from its issue to its completion by a wait of the same
  // thread.
  uint32_t issue(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes);
  void complete(Warp& w, int lane, uint32_t offset, int bytes);
  void forget(uint32_t offset, int bytes);  // of a copy that was still in flight at the CTA's end

  void warp_sync(Warp& w, uint32_t mask, uint32_t live);
  void barrier(const std::vector<int>& arrived, const std::vector<int>& released);

 private:
  static constexpr uint32_t kInFlight = 1u << 31;
  static constexpr int kTimeShift = 11, kWarpShift = 6;
  static constexpr uint32_t kLaneMask = 63, kManyLanes = 63, kAtomicLane = 62;
  static constexpr uint32_t kMaxTime = 1u << 20;

  uint32_t tag(int warp, uint32_t lane) const {
    return time_ << kTimeShift | uint32_t(warp) << kWarpShift | lane;
  }
  uint32_t known(int w, int u) const { return known_[w * warps_ + u]; }
  void tick();
  void update_horizon(int w);
  bool ordered(const Warp& w, int lane, uint32_t time, int u, uint32_t u_lane) const;

  // The tags of one granule, or of one byte of a granule that was split.
  struct Cell {
    uint32_t* written;
    int32_t* writer_pc;
    uint32_t* read;  // of warp 0
    int64_t stride;  // to the next warp's
    int64_t offset;  // of its first byte
    int bytes;
  };
  Cell cell(int64_t granule);
  bool check_read(Warp& w, int pc, int lane, const Cell& c, bool collective);
  bool check_write(Warp& w, int pc, int lane, const Cell& c, bool atomic, const uint8_t* data);

  // Accesses of single bytes split their granule: rare, so bytes cost the others nothing.
  struct Piece {
    uint32_t written;
    int32_t writer_pc;
    std::vector<uint32_t> read;
  };
  static constexpr uint32_t kSplit = kInFlight;  // in place of a tag: later than everything
  std::vector<Piece>* pieces(int64_t granule);
  std::vector<Piece>& split(int64_t granule);
  Cell cell(std::vector<Piece>& pieces, int64_t granule, int byte);
  uint32_t access_bytes(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes,
                        uint32_t flags, const uint8_t* const* data, bool write);
  void mark_read(uint32_t& mark, uint32_t lane) const;
  bool read_pieces(Warp& w, int pc, int lane, int64_t granule, bool collective);
  bool check_granule_write(Warp& w, int pc, int lane, int64_t granule, bool atomic,
                           const uint8_t* data);
  template <int N>
  uint32_t read_n(Warp& w, int pc, uint32_t mask, const uint32_t* offset, bool collective);
  template <int N>
  uint32_t write_n(Warp& w, int pc, uint32_t mask, const uint32_t* offset, uint32_t flags,
                   const uint8_t* const* data);
  uint32_t dispatch_write(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes,
                          uint32_t flags, const uint8_t* const* data);
  void report(Warp& w, int pc, int lane, const char* kind, const std::string& what, int64_t granule,
              int other_pc);
  std::string thread_name(int warp, uint32_t lane) const;

  Cta* cta_ = nullptr;
  bool enabled_ = true;
  int warps_ = 0, shift_ = 2;
  int64_t granules_ = 0, plane_ = 0;
  uint32_t time_ = 1, start_ = 1;
  std::vector<uint32_t> written_;  // tag of the last write, one a granule
  std::vector<int32_t> writer_pc_;
  std::vector<uint32_t>
      read_;  // [warp][granule]: time << kWarpShift | lane of the warp's last read
  std::vector<uint32_t> known_, horizon_;  // horizon: the least of what a warp knows; a quick test
  std::vector<uint32_t> lane_known_;  // [warp][lane][lane]: what partial __syncwarp masks added
  std::vector<bool> has_lane_known_;
  std::unordered_map<int64_t, std::vector<Piece>> split_;
};

}  // namespace cudasim
