#include "runtime.h"

#include <cstring>

#include "fatbin.h"
#include "memory.h"

namespace cudasim {

namespace {
thread_local int g_last_error = 0;
}  // namespace

Runtime& Runtime::instance() {
  static Runtime* runtime =
      new Runtime;  // libraries unregister their fat binaries in static destructors
  return *runtime;
}

void* Runtime::register_fatbin(const void* wrapper) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto m = std::make_unique<FatModule>();
  std::memcpy(&m->data, static_cast<const uint8_t*>(wrapper) + 8, sizeof m->data);
  fat_modules_.push_back(std::move(m));
  return fat_modules_.back().get();
}

void Runtime::unregister_fatbin(void* handle) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto it = fat_modules_.begin(); it != fat_modules_.end(); ++it) {
    if (it->get() != handle) continue;
    for (auto& [stub, name] : (*it)->functions) {
      auto entry = stubs_.find(stub);
      if (entry == stubs_.end()) continue;
      auto named = names_.find(name);
      if (named != names_.end() && named->second == entry->second) names_.erase(named);
      kernels_.erase(entry->second);
      stubs_.erase(entry);
    }
    fat_modules_.erase(it);
    return;
  }
}

void Runtime::register_function(void* handle, const void* stub, const char* name) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  static_cast<FatModule*>(handle)->functions.push_back({stub, name});
}

void Runtime::register_variable(void* handle, const void* host, const char* name) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  static_cast<FatModule*>(handle)->variables.push_back({host, name});
}

std::shared_ptr<PtxModule> Runtime::add_module(const std::string& text) {
  auto module = std::make_shared<PtxModule>(text);
  for (auto& [name, g] : module->globals())
    DeviceMemory::instance().add(g.address, g.size, !g.constant, name);
  return module;
}

void Runtime::load(FatModule& m) {
  if (m.loaded) return;
  m.loaded = true;
  for (const auto& text : read_fatbin(m.data)) m.modules.push_back(add_module(text));
  for (auto& [stub, name] : m.functions) {
    for (auto& module : m.modules) {
      if (!module->has_entry(name)) continue;
      stubs_[stub] = add_kernel(name, module);
      break;
    }
  }
}

KernelEntry* Runtime::add_kernel(const std::string& name, std::shared_ptr<PtxModule> module) {
  auto entry = std::make_unique<KernelEntry>();
  entry->name = name;
  entry->module = std::move(module);
  KernelEntry* k = names_[name] = entry.get();
  kernels_[k] = std::move(entry);
  return k;
}

void* Runtime::symbol_address(const void* host) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& m : fat_modules_)
    for (auto& [variable, name] : m->variables) {
      if (variable != host) continue;
      load(*m);
      for (auto& module : m->modules)
        if (GlobalVariable* g = module->global(name)) return g->address;
    }
  return nullptr;
}

KernelEntry* Runtime::by_stub(const void* stub) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto it = stubs_.find(stub);
  if (it != stubs_.end()) return it->second;
  for (auto& m : fat_modules_)
    for (auto& [s, name] : m->functions)
      if (s == stub && !m->loaded) {
        load(*m);
        return by_stub(stub);
      }
  return nullptr;
}

KernelEntry* Runtime::by_name(const std::string& name) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& m : fat_modules_) load(*m);
  auto it = names_.find(name);
  if (it != names_.end()) return it->second;
  KernelEntry* found = nullptr;
  for (auto& [n, entry] : names_) {
    if (n.find(name) == std::string::npos) continue;
    if (found) throw PtxError("more than one kernel's name contains " + name);
    found = entry;
  }
  return found;
}

void Runtime::load_text(const std::string& ptx) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto module = add_module(ptx);
  for (const auto& name : module->entries()) add_kernel(name, module);
}

std::vector<std::string> Runtime::kernel_names() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& m : fat_modules_) load(*m);
  std::vector<std::string> names;
  for (auto& [name, entry] : names_) names.push_back(name);
  return names;
}

std::shared_ptr<Program> Runtime::program(KernelEntry& kernel) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& base = kernel.programs[-1];
  if (!base) base = build_program(kernel.module, kernel.name);
  auto& p = kernel.programs[kernel.mutant];
  if (!p) p = delete_instruction(*base, kernel.mutant);
  return p;
}

std::vector<Mutant> Runtime::mutants(KernelEntry& kernel) {
  auto p = program(kernel);
  std::vector<Mutant> out;
  for (size_t i = 0; i < p->kernel->code.size(); ++i) {
    const PtxInst& inst = p->kernel->code[i];
    const bool barrier = inst.op == "bar" || inst.op == "barrier";
    const bool async = inst.op == "cp" &&
                       (inst.has("wait_group") || inst.has("wait_all") || inst.has("commit_group"));
    if (!barrier && !async) continue;
    Finding f;
    describe_location(*p, static_cast<int>(i), f);
    out.push_back({static_cast<int>(i), f.ptx_line, f.ptx, f.source});
  }
  return out;
}

void Runtime::set_mutant(KernelEntry& kernel, int index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (kernel.mutant >= 0) kernel.programs.erase(kernel.mutant);
  kernel.mutant = index;
}

std::vector<std::shared_ptr<LaunchReport>> Runtime::reports(bool clear) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<std::shared_ptr<LaunchReport>> out(reports_.begin(), reports_.end());
  if (clear) reports_.clear();
  return out;
}

int Runtime::last_error(bool clear) {
  int e = g_last_error;
  if (clear) g_last_error = 0;
  return e;
}

void Runtime::set_error(int error) {
  if (error) g_last_error = error;
}

}  // namespace cudasim
