#include "liveness.h"

#include <algorithm>
#include <queue>
#include <unordered_set>

namespace cudasim {

int destination_count(const PtxInst& inst) {
  static const std::unordered_set<std::string> kNone = {
      "st",        "red",       "bra",     "brx",           "cp",    "membar",
      "fence",     "exit",      "ret",     "trap",          "brkpt", "prefetch",
      "prefetchu", "nanosleep", "discard", "applypriority", "call",  "griddepcontrol"};
  if (kNone.count(inst.op)) return 0;
  if (inst.op == "bar" || inst.op == "barrier") return inst.has("red") ? 1 : 0;
  return inst.operands.empty() ? 0 : 1;
}

namespace {

// The handlers of these read their sources after they have written part of their destinations.
bool early_clobber(const PtxInst& inst) {
  static const std::unordered_set<std::string> kOps = {
      "mma",  "ldmatrix", "movmatrix", "ld",         "ldu", "atom",   "shfl",
      "vote", "match",    "redux",     "activemask", "bar", "barrier"};
  if (kOps.count(inst.op)) return true;
  for (const auto& o : inst.operands)
    if (o.kind == Operand::Kind::kVector || o.second >= 0) return true;
  return false;
}

struct UseDef {
  std::vector<int> uses, defs;
};

void collect(const Operand& o, std::vector<int>& out) {
  if (o.kind == Operand::Kind::kReg || o.kind == Operand::Kind::kAddress) {
    if (o.reg >= 0) out.push_back(o.reg);
    if (o.second >= 0) out.push_back(o.second);
  }
  for (const auto& item : o.items) collect(item, out);
}

UseDef use_def(const PtxInst& inst) {
  UseDef r;
  int n = destination_count(inst);
  for (int i = 0; i < static_cast<int>(inst.operands.size()); ++i)
    collect(inst.operands[i],
            i < n && inst.operands[i].kind != Operand::Kind::kAddress ? r.defs : r.uses);
  if (inst.guard >= 0) {
    r.uses.push_back(inst.guard);
    r.uses.insert(r.uses.end(), r.defs.begin(),
                  r.defs.end());  // lanes that the guard masks keep their old value
  }
  return r;
}

struct Block {
  int begin = 0, end = 0;
  std::vector<int> successors;
  std::vector<uint64_t> use, def, in, out;
};

bool ends_block(const PtxInst& i) {
  return i.op == "bra" || i.op == "brx" || i.op == "exit" || i.op == "ret" || i.op == "trap";
}

std::vector<Block> build_blocks(const Kernel& k) {
  const int n = static_cast<int>(k.code.size());
  std::vector<char> leader(n + 1, 0);
  leader[0] = leader[n] = 1;
  for (int i = 0; i < n; ++i) {
    for (int t : k.code[i].targets) leader[t] = 1;
    if (ends_block(k.code[i])) leader[i + 1] = 1;
  }
  std::vector<Block> blocks;
  std::vector<int> block_of(n + 1, 0);
  for (int i = 0; i < n; ++i) {
    if (leader[i]) {
      blocks.emplace_back();
      blocks.back().begin = i;
    }
    blocks.back().end = i + 1;
    block_of[i] = static_cast<int>(blocks.size()) - 1;
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    const PtxInst& last = k.code[blocks[b].end - 1];
    for (int t : last.targets) blocks[b].successors.push_back(block_of[t]);
    bool falls = !ends_block(last) || last.guard >= 0;
    if (falls && b + 1 < blocks.size()) blocks[b].successors.push_back(static_cast<int>(b) + 1);
  }
  return blocks;
}

void solve(const std::vector<UseDef>& ud, const Kernel& k, std::vector<Block>& blocks) {
  const size_t words = (k.registers.size() + 63) / 64;
  for (auto& b : blocks) {
    b.use.assign(words, 0);
    b.def = b.in = b.out = b.use;
    for (int i = b.begin; i < b.end; ++i) {
      for (int r : ud[i].uses)
        if (!(b.def[r / 64] >> (r % 64) & 1)) b.use[r / 64] |= 1ull << (r % 64);
      if (k.code[i].guard < 0)
        for (int r : ud[i].defs) b.def[r / 64] |= 1ull << (r % 64);
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = blocks.size(); i-- > 0;) {
      Block& b = blocks[i];
      for (size_t w = 0; w < words; ++w) {
        uint64_t out = 0;
        for (int s : b.successors) out |= blocks[s].in[w];
        b.out[w] = out;
        uint64_t in = b.use[w] | (out & ~b.def[w]);
        changed |= in != b.in[w];
        b.in[w] = in;
      }
    }
  }
}

struct Interval {
  int begin = INT32_MAX, end = -1;
  void cover(int p) {
    begin = std::min(begin, p);
    end = std::max(end, p);
  }
};

}  // namespace

RegisterMap allocate_registers(const Kernel& k, int64_t first) {
  std::vector<UseDef> ud;
  for (const auto& inst : k.code) ud.push_back(use_def(inst));
  std::vector<Block> blocks = build_blocks(k);
  solve(ud, k, blocks);

  std::vector<Interval> live(k.registers.size());
  for (const auto& b : blocks)
    for (size_t w = 0; w < b.in.size(); ++w) {
      for (uint64_t bits = b.in[w]; bits; bits &= bits - 1)
        live[w * 64 + __builtin_ctzll(bits)].cover(2 * b.begin);
      for (uint64_t bits = b.out[w]; bits; bits &= bits - 1)
        live[w * 64 + __builtin_ctzll(bits)].cover(2 * b.end);
    }
  for (size_t i = 0; i < ud.size(); ++i) {
    for (int r : ud[i].uses) live[r].cover(2 * static_cast<int>(i));
    int at = 2 * static_cast<int>(i) + 1;
    for (int r : ud[i].defs) {
      if (early_clobber(k.code[i])) live[r].cover(at - 1);
      live[r].cover(at);
    }
  }

  std::vector<int> order;
  for (size_t r = 0; r < live.size(); ++r)
    if (live[r].end >= 0) order.push_back(static_cast<int>(r));
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return live[a].begin < live[b].begin; });

  RegisterMap map;
  map.offset.assign(k.registers.size(), -1);
  map.bytes = first;
  using Expiry = std::pair<int, int>;  // end, register
  std::priority_queue<Expiry, std::vector<Expiry>, std::greater<Expiry>> active;
  std::vector<int32_t> free_slots[9];
  auto size_class = [&](int r) {
    return k.registers[r].type == Type::kPred ? 0 : size_of(k.registers[r].type);
  };
  for (int r : order) {
    while (!active.empty() && active.top().first < live[r].begin) {
      int old = active.top().second;
      free_slots[size_class(old)].push_back(map.offset[old]);
      active.pop();
    }
    int c = size_class(r);
    if (free_slots[c].empty()) {
      if (c == 0) {  // predicates: a cache line of 16 masks at a time
        for (int i = 15; i >= 0; --i)
          free_slots[0].push_back(static_cast<int32_t>(map.bytes + 4 * i));
        map.bytes += 64;
      } else {
        int bytes = std::max(c, 2) * kWarpSize;
        free_slots[c].push_back(static_cast<int32_t>(map.bytes));
        map.bytes += bytes;
      }
    }
    map.offset[r] = free_slots[c].back();
    free_slots[c].pop_back();
    active.push({live[r].end, r});
  }
  return map;
}

}  // namespace cudasim
