// One <<<>>> launch: the checks of its configuration, the blocks over the host threads, the report.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "memory.h"
#include "runtime.h"

namespace cudasim {

namespace {

constexpr int kInvalidValue = 1, kInvalidConfiguration = 9, kLaunchFailure = 719;
constexpr int64_t kMaxSharedPerBlock = 163 * 1024;  // sm_80, opted in

// Empty: the configuration is legal on sm_80.
std::string configuration_error(const KernelEntry& kernel, const Kernel& k, const Launch& l) {
  const uint64_t threads = uint64_t(l.block[0]) * l.block[1] * l.block[2];
  if (threads == 0 || uint64_t(l.grid[0]) * l.grid[1] * l.grid[2] == 0)
    return "the grid or the block is empty";
  if (threads > 1024 || l.block[2] > 64)
    return "a block of " + std::to_string(threads) + " threads; at most 1024, 64 of them in z";
  if (threads > uint64_t(k.max_threads))
    return "a block of " + std::to_string(threads) +
           " threads for a kernel whose launch bound is " + std::to_string(k.max_threads);
  if (k.required_threads[0])
    for (int d = 0; d < 3; ++d)
      if (l.block[d] != uint32_t(k.required_threads[d]))
        return "the block differs from the kernel's .reqntid";
  if (l.grid[0] > 0x7FFFFFFFu || l.grid[1] > 65535 || l.grid[2] > 65535)
    return "the grid is larger than 2^31-1 x 65535 x 65535";
  if (l.dynamic_shared > kernel.max_dynamic_shared)
    return std::to_string(l.dynamic_shared) +
           " bytes of dynamic shared memory; the kernel may use " +
           std::to_string(kernel.max_dynamic_shared) +
           " (cudaFuncAttributeMaxDynamicSharedMemorySize)";
  if (l.dynamic_shared + k.static_shared > kMaxSharedPerBlock)
    return std::to_string(l.dynamic_shared + k.static_shared) +
           " bytes of shared memory; sm_80 has " + std::to_string(kMaxSharedPerBlock);
  return "";
}

void add(PcCounter& to, const PcCounter& from) {
  to.executed += from.executed;
  to.wavefronts += from.wavefronts;
  to.ideal_wavefronts += from.ideal_wavefronts;
  to.sectors += from.sectors;
  to.ideal_sectors += from.ideal_sectors;
}

void summarise(LaunchReport& r) {
  const auto& code = r.program->code;
  for (size_t pc = 0; pc < code.size(); ++pc) {
    const PcCounter& c = r.counters[pc];
    const InstClass cls = code[pc].cls;
    r.instructions[static_cast<int>(cls)] += c.executed;
    r.total_instructions += c.executed;
    PcCounter shared = c, global = c;
    shared.sectors = shared.ideal_sectors = 0;
    global.wavefronts = global.ideal_wavefronts = 0;
    const bool store = cls == InstClass::kStoreGlobal || cls == InstClass::kStoreShared ||
                       cls == InstClass::kStoreGeneric;
    if (c.ideal_wavefronts)
      add(store || cls == InstClass::kCpAsync ? r.shared_store : r.shared_load, shared);
    if (c.ideal_sectors) add(store ? r.global_store : r.global_load, global);
  }
}

void run_blocks(const Launch& l, std::atomic<uint64_t>& next, uint64_t blocks,
                std::atomic<bool>& stop, std::vector<PcCounter>& total, std::mutex& mutex) {
  Cta cta;
  cta.prepare(l);
  for (uint64_t b = next++; b < blocks && !stop; b = next++)
    if (!cta.run(b)) stop = true;
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t pc = 0; pc < total.size(); ++pc) add(total[pc], cta.counters[pc]);
}

}  // namespace

std::vector<LineCounters> LaunchReport::lines() const {
  std::vector<LineCounters> out;
  for (size_t pc = 0; pc < counters.size(); ++pc) {
    if (!counters[pc].executed) continue;
    Finding f;
    describe_location(*program, static_cast<int>(pc), f);
    out.push_back({f.ptx_line, f.ptx, f.stack.empty() ? f.source : f.stack.back(),
                   program->code[pc].cls, counters[pc]});
  }
  return out;
}

// A long run whose reports nobody reads must not fill the memory: the oldest lose their
// counters by line first.
void Runtime::trim_reports() {
  constexpr size_t kMaxDetailed = 256, kMaxReports = 1 << 16;
  if (reports_.size() > kMaxDetailed) {
    auto& old = reports_[reports_.size() - kMaxDetailed - 1]->counters;
    std::vector<PcCounter>().swap(old);
  }
  if (reports_.size() > kMaxReports) reports_.pop_front();
}

int Runtime::launch(KernelEntry& kernel, const uint32_t grid[3], const uint32_t block[3],
                    const void* const* args, int64_t dynamic_shared) {
  auto report = std::make_shared<LaunchReport>();
  report->kernel = kernel.name;
  report->dynamic_shared = dynamic_shared;
  std::copy(grid, grid + 3, report->grid);
  std::copy(block, block + 3, report->block);
  const auto start = std::chrono::steady_clock::now();

  Launch l;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    report->program = program(kernel);
    l.options = options;
    l.grid_id = ++launches_;
  }
  const Program& p = *report->program;
  FindingSink sink(&p);
  l.program = &p;
  l.findings = &sink;
  l.dynamic_shared = dynamic_shared;
  std::copy(grid, grid + 3, l.grid);
  std::copy(block, block + 3, l.block);
  l.params.assign(p.kernel->param_size, 0);
  for (size_t i = 0; i < p.kernel->params.size(); ++i)
    std::memcpy(l.params.data() + p.kernel->params[i].offset, args[i], p.kernel->params[i].size);
  l.buffers = DeviceMemory::instance().snapshot();
  l.budget = static_cast<int64_t>(std::min<uint64_t>(l.options.max_instructions, INT64_MAX));
  report->static_shared = p.kernel->static_shared;
  report->counters.assign(p.code.size(), PcCounter());

  const std::string refused = configuration_error(kernel, *p.kernel, l);
  if (!refused.empty()) {
    sink.add("launch_limits", 0, nullptr, -1, -1, refused);
    report->error =
        refused.find("dynamic") != std::string::npos ? kInvalidValue : kInvalidConfiguration;
  } else {
    const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    std::atomic<uint64_t> next{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    const int threads =
        static_cast<int>(std::min<uint64_t>(std::max(1, l.options.threads), blocks));
    std::vector<std::thread> pool;
    for (int t = 1; t < threads; ++t)
      pool.emplace_back([&] { run_blocks(l, next, blocks, stop, report->counters, mutex); });
    run_blocks(l, next, blocks, stop, report->counters, mutex);
    for (auto& t : pool) t.join();
  }
  report->findings = sink.take();
  if (!report->findings.empty() && !report->error) report->error = kLaunchFailure;
  summarise(*report);
  report->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  set_error(report->error);
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  reports_.push_back(report);
  trim_reports();
  return report->error;
}

}  // namespace cudasim
