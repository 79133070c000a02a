#include "findings.h"

#include "inst.h"

namespace cudasim {

void describe_location(const Program& program, int pc, Finding& out) {
  if (pc < 0 || pc >= static_cast<int>(program.kernel->code.size())) return;
  const PtxInst& inst = program.kernel->code[pc];
  out.ptx_line = inst.line;
  out.ptx = program.module->line_text(inst.line);
  auto text = [&](const Location& l) {
    return program.module->file_name(l.file) + ":" + std::to_string(l.line);
  };
  const auto& locs = program.kernel->locs;
  if (inst.loc < 0) {
    out.source = "unknown";
    return;
  }
  out.source = text(locs[inst.loc]);
  for (int i = locs[inst.loc].inlined_at; i >= 0 && out.stack.size() < 64; i = locs[i].inlined_at)
    out.stack.push_back(text(locs[i]));
}

void FindingSink::add(const char* kind, int pc, const int* block, int warp, int thread,
                      const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  any_ = true;
  auto [it, added] = findings_.try_emplace({kind, pc});
  Finding& f = it->second;
  if (!added) {
    ++f.count;
    return;
  }
  f.kind = kind;
  f.message = message;
  f.kernel = program_->kernel->name;
  describe_location(*program_, pc, f);
  if (block)
    for (int i = 0; i < 3; ++i) f.block[i] = block[i];
  f.warp = warp;
  f.thread = thread;
}

std::vector<Finding> FindingSink::take() {
  std::vector<Finding> out;
  for (auto& [key, f] : findings_) out.push_back(std::move(f));
  findings_.clear();
  return out;
}

}  // namespace cudasim
