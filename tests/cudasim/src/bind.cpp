// The Python module _cudasim.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "fatbin.h"
#include "memory.h"
#include "runtime.h"

namespace py = pybind11;
using namespace cudasim;

namespace {

KernelEntry& find_kernel(const std::string& name) {
  KernelEntry* k = Runtime::instance().by_name(name);
  if (!k) throw py::key_error("no loaded kernel's name contains '" + name + "'");
  return *k;
}

py::tuple triple(const uint32_t v[3]) {
  return py::make_tuple(v[0], v[1], v[2]);
}

// Arguments arrive as bytes already of each parameter's size.
std::shared_ptr<LaunchReport> launch(const std::string& name, std::array<uint32_t, 3> grid,
                                     std::array<uint32_t, 3> block,
                                     const std::vector<std::string>& args, int64_t shared) {
  KernelEntry& k = find_kernel(name);
  auto program = Runtime::instance().program(k);
  const auto& params = program->kernel->params;
  if (params.size() != args.size())
    throw py::value_error(name + " takes " + std::to_string(params.size()) + " arguments, got " +
                          std::to_string(args.size()));
  std::vector<const void*> pointers;
  for (size_t i = 0; i < args.size(); ++i) {
    if (static_cast<int64_t>(args[i].size()) != params[i].size)
      throw py::value_error("argument " + std::to_string(i) + " of " + name + " has " +
                            std::to_string(params[i].size) + " bytes, got " +
                            std::to_string(args[i].size()));
    pointers.push_back(args[i].data());
  }
  py::gil_scoped_release release;
  Runtime::instance().launch(k, grid.data(), block.data(), pointers.data(), shared);
  Runtime::instance().last_error(true);
  return Runtime::instance().reports(false).back();
}

py::dict counter_dict(const PcCounter& c) {
  py::dict d;
  d["wavefronts"] = c.wavefronts;
  d["ideal_wavefronts"] = c.ideal_wavefronts;
  d["sectors"] = c.sectors;
  d["ideal_sectors"] = c.ideal_sectors;
  return d;
}

void bind_report(py::module_& m) {
  py::class_<Finding>(m, "Finding")
      .def_readonly("kind", &Finding::kind)
      .def_readonly("message", &Finding::message)
      .def_readonly("kernel", &Finding::kernel)
      .def_readonly("ptx_line", &Finding::ptx_line)
      .def_readonly("ptx", &Finding::ptx)
      .def_readonly("source", &Finding::source)
      .def_readonly("stack", &Finding::stack)
      .def_property_readonly(
          "block",
          [](const Finding& f) { return py::make_tuple(f.block[0], f.block[1], f.block[2]); })
      .def_readonly("thread", &Finding::thread)
      .def_readonly("warp", &Finding::warp)
      .def_readonly("count", &Finding::count)
      .def("__repr__", [](const Finding& f) {
        std::string s = f.kind + ": " + f.message + "\n  in " + f.kernel + ", block (" +
                        std::to_string(f.block[0]) + ", " + std::to_string(f.block[1]) + ", " +
                        std::to_string(f.block[2]) + ")";
        if (f.warp >= 0) s += ", warp " + std::to_string(f.warp);
        if (f.thread >= 0) s += ", thread " + std::to_string(f.thread);
        if (f.count > 1) s += ", " + std::to_string(f.count) + " times";
        s += "\n  PTX line " + std::to_string(f.ptx_line) + ": " + f.ptx + "\n  at " + f.source;
        for (const auto& c : f.stack) s += "\n     from " + c;
        return s;
      });
  py::class_<LaunchReport, std::shared_ptr<LaunchReport>>(m, "LaunchReport")
      .def_readonly("kernel", &LaunchReport::kernel)
      .def_property_readonly("grid", [](const LaunchReport& r) { return triple(r.grid); })
      .def_property_readonly("block", [](const LaunchReport& r) { return triple(r.block); })
      .def_readonly("static_shared", &LaunchReport::static_shared)
      .def_readonly("dynamic_shared", &LaunchReport::dynamic_shared)
      .def_readonly("error", &LaunchReport::error)
      .def_readonly("findings", &LaunchReport::findings)
      .def_readonly("total_instructions", &LaunchReport::total_instructions)
      .def_readonly("seconds", &LaunchReport::seconds)
      .def_property_readonly("instructions",
                             [](const LaunchReport& r) {
                               py::dict d;
                               for (int c = 0; c < static_cast<int>(InstClass::kCount); ++c)
                                 d[class_name(InstClass(c))] = r.instructions[c];
                               return d;
                             })
      .def_property_readonly(
          "bank_conflicts",
          [](const LaunchReport& r) {
            return r.shared_load.wavefronts + r.shared_store.wavefronts -
                   r.shared_load.ideal_wavefronts - r.shared_store.ideal_wavefronts;
          },
          "shared-memory wavefronts beyond the ideal")
      .def_property_readonly(
          "global_efficiency",
          [](const LaunchReport& r) {
            uint64_t n = r.global_load.sectors + r.global_store.sectors;
            return n ? double(r.global_load.ideal_sectors + r.global_store.ideal_sectors) / n : 1.0;
          },
          "ideal over actual 32-byte sectors, loads and stores")
      .def_property_readonly("shared_load",
                             [](const LaunchReport& r) { return counter_dict(r.shared_load); })
      .def_property_readonly("shared_store",
                             [](const LaunchReport& r) { return counter_dict(r.shared_store); })
      .def_property_readonly("global_load",
                             [](const LaunchReport& r) { return counter_dict(r.global_load); })
      .def_property_readonly("global_store",
                             [](const LaunchReport& r) { return counter_dict(r.global_store); })
      .def(
          "lines",
          [](const LaunchReport& r) {
            py::list out;
            for (const auto& l : r.lines()) {
              py::dict d = counter_dict(l.counter);
              d["ptx_line"] = l.ptx_line;
              d["ptx"] = l.ptx;
              d["source"] = l.source;
              d["class"] = class_name(l.cls);
              d["executed"] = l.counter.executed;
              out.append(d);
            }
            return out;
          },
          "one dict for each executed PTX instruction, with its counters");
}

}  // namespace

PYBIND11_MODULE(_cudasim, m) {
  py::register_exception<PtxError>(m, "PtxError", PyExc_RuntimeError);
  bind_report(m);
  py::class_<Mutant>(m, "Mutant")
      .def_readonly("index", &Mutant::index)
      .def_readonly("ptx_line", &Mutant::ptx_line)
      .def_readonly("ptx", &Mutant::ptx)
      .def_readonly("source", &Mutant::source)
      .def("__repr__", [](const Mutant& x) {
        return "delete PTX line " + std::to_string(x.ptx_line) + ": " + x.ptx + " (" + x.source +
               ")";
      });
  py::class_<Options>(m, "Options")
      .def_readwrite("max_instructions", &Options::max_instructions)
      .def_readwrite("seed", &Options::seed)
      .def_readwrite("threads", &Options::threads)
      .def_readwrite("strict_memory", &Options::strict_memory)
      .def_readwrite("race_check", &Options::race_check);
  m.def(
      "options", []() -> Options& { return Runtime::instance().options; },
      py::return_value_policy::reference);
  m.def(
      "register",
      [](uint64_t p, size_t bytes, bool writable, const std::string& name) {
        DeviceMemory::instance().add(reinterpret_cast<const void*>(p), bytes, writable, name);
      },
      py::arg("ptr"), py::arg("nbytes"), py::arg("writable") = true, py::arg("name") = "");
  m.def("unregister", [](uint64_t p) {
    return DeviceMemory::instance().remove(reinterpret_cast<const void*>(p));
  });
  m.def("load_ptx", [](const std::string& text) { Runtime::instance().load_text(text); });
  m.def("read_ptx_file", &read_ptx_file);
  m.def("kernels", [] { return Runtime::instance().kernel_names(); });
  m.def("kernel_name", [](const std::string& name) { return find_kernel(name).name; });
  m.def("launch", &launch);
  m.def("param_sizes", [](const std::string& name) {
    std::vector<int64_t> sizes;
    for (const auto& p : Runtime::instance().program(find_kernel(name))->kernel->params)
      sizes.push_back(p.size);
    return sizes;
  });
  m.def("kernel_info", [](const std::string& name) {
    auto p = Runtime::instance().program(find_kernel(name));
    py::dict d;
    d["instructions"] = p->code.size();
    d["static_shared"] = p->kernel->static_shared;
    d["local_bytes"] = p->kernel->local_size;
    d["virtual_registers"] = p->kernel->registers.size();
    d["warp_file_bytes"] = p->file_bytes;
    d["unsupported"] = p->messages;
    py::dict classes;
    for (const auto& inst : p->code) {
      const char* name = class_name(inst.cls);
      classes[name] = (classes.contains(name) ? classes[name].cast<int>() : 0) + 1;
    }
    d["classes"] = classes;
    return d;
  });
  m.def("set_max_dynamic_shared", [](const std::string& name, int64_t bytes) {
    find_kernel(name).max_dynamic_shared = bytes;
  });
  m.def(
      "reports", [](bool clear) { return Runtime::instance().reports(clear); },
      py::arg("clear") = false);
  m.def("mutants",
        [](const std::string& name) { return Runtime::instance().mutants(find_kernel(name)); });
  m.def("set_mutant", [](const std::string& name, int index) {
    Runtime::instance().set_mutant(find_kernel(name), index);
  });
}
