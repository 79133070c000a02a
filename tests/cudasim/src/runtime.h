// The simulated device: modules, kernels, launches and their reports. One instance a process.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cta.h"

namespace cudasim {

struct LineCounters {
  int ptx_line = 0;
  std::string ptx, source;
  InstClass cls = InstClass::kOther;
  PcCounter counter;
};

struct LaunchReport {
  std::string kernel;
  uint32_t grid[3], block[3];
  int64_t static_shared = 0, dynamic_shared = 0;
  int error = 0;
  std::vector<Finding> findings;
  uint64_t instructions[static_cast<int>(InstClass::kCount)] = {};
  uint64_t total_instructions = 0;
  PcCounter shared_load, shared_store, global_load, global_store;
  std::shared_ptr<const Program> program;
  std::vector<PcCounter> counters;
  double seconds = 0;
  std::vector<LineCounters> lines() const;  // per PTX instruction, those that were executed
};

struct KernelEntry {
  std::string name;
  std::shared_ptr<PtxModule> module;
  int64_t max_dynamic_shared = 48 * 1024;
  int mutant = -1;
  std::map<int, std::shared_ptr<Program>> programs;  // by mutant
};

// An instruction whose deletion must be caught: a barrier, wait or commit.
struct Mutant {
  int index = 0;  // into the kernel's instructions
  int ptx_line = 0;
  std::string ptx, source;
};

class Runtime {
 public:
  static Runtime& instance();

  void* register_fatbin(const void* wrapper);
  void unregister_fatbin(void* handle);
  void register_function(void* handle, const void* stub, const char* name);
  void register_variable(void* handle, const void* host, const char* name);
  void* symbol_address(const void* host);

  KernelEntry* by_stub(const void* stub);
  KernelEntry* by_name(const std::string& name);  // exact, or the only one that contains it
  void load_text(const std::string& ptx);
  std::vector<std::string> kernel_names();

  int launch(KernelEntry& kernel, const uint32_t grid[3], const uint32_t block[3],
             const void* const* args, int64_t dynamic_shared);
  std::shared_ptr<Program> program(KernelEntry& kernel);
  std::vector<Mutant> mutants(KernelEntry& kernel);
  // Launches on both sides of a mutant's life see a consistent program; index < 0 restores the
  // kernel.
  void set_mutant(KernelEntry& kernel, int index);

  Options options;
  std::vector<std::shared_ptr<LaunchReport>> reports(bool clear);
  int last_error(bool clear);
  void set_error(int error);

 private:
  struct FatModule {
    const void* data = nullptr;
    std::vector<std::shared_ptr<PtxModule>> modules;
    bool loaded = false;
    std::vector<std::pair<const void*, std::string>> functions, variables;
  };
  void load(FatModule& m);
  void trim_reports();  // the caller holds the lock
  std::shared_ptr<PtxModule> add_module(const std::string& text);

  std::recursive_mutex mutex_;
  std::vector<std::unique_ptr<FatModule>> fat_modules_;
  KernelEntry* add_kernel(const std::string& name, std::shared_ptr<PtxModule> module);
  std::map<const void*, KernelEntry*> stubs_;
  std::map<std::string, KernelEntry*>
      names_;  // of two kernels with one name the later: a template in two libraries
  std::map<KernelEntry*, std::unique_ptr<KernelEntry>> kernels_;
  std::deque<std::shared_ptr<LaunchReport>> reports_;
  uint64_t launches_ = 0;
};

}  // namespace cudasim
