#include "fatbin.h"

#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "ptx.h"

namespace cudasim {

namespace {

constexpr uint32_t kFatbinMagic = 0xBA55ED50u;
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;

template <class T>
T field(const uint8_t* p, size_t offset) {
  T v;
  std::memcpy(&v, p + offset, sizeof v);
  return v;
}

// Appends the PTX entries; returns the container's size.
size_t read_container(const uint8_t* p, std::vector<std::string>& texts) {
  if (field<uint32_t>(p, 0) != kFatbinMagic) throw PtxError("not a fat binary");
  const size_t header = field<uint16_t>(p, 6), size = field<uint64_t>(p, 8);
  for (size_t at = header; at + 64 <= header + size;) {
    const uint8_t* e = p + at;
    const uint16_t kind = field<uint16_t>(e, 0);
    const uint32_t entry_header = field<uint32_t>(e, 4);
    const uint64_t payload = field<uint64_t>(e, 8), flags = field<uint64_t>(e, 40);
    if (entry_header == 0) break;
    if (kind == 1) {
      if (flags & (kLz4 | kZstd))
        throw PtxError("the PTX is compressed: compile with nvcc -no-compress");
      std::string text(reinterpret_cast<const char*>(e + entry_header), payload);
      text.resize(std::strlen(text.c_str()));  // NUL padded
      texts.push_back(std::move(text));
    }
    at += entry_header + payload;
  }
  return header + size;
}

}  // namespace

std::vector<std::string> read_fatbin(const void* data) {
  std::vector<std::string> texts;
  read_container(static_cast<const uint8_t*>(data), texts);
  return texts;
}

std::vector<std::string> read_ptx_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw PtxError("cannot read " + path);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const uint8_t* p = reinterpret_cast<const uint8_t*>(bytes.data());
  if (bytes.size() >= 16 && field<uint32_t>(p, 0) == kFatbinMagic) return read_fatbin(p);
  if (bytes.size() < sizeof(Elf64_Ehdr) || std::memcmp(p, ELFMAG, SELFMAG) != 0) return {bytes};
  const auto header = field<Elf64_Ehdr>(p, 0);
  const auto names =
      field<Elf64_Shdr>(p, header.e_shoff + size_t(header.e_shstrndx) * header.e_shentsize);
  std::vector<std::string> texts;
  for (int i = 0; i < header.e_shnum; ++i) {
    const auto section = field<Elf64_Shdr>(p, header.e_shoff + size_t(i) * header.e_shentsize);
    if (std::strcmp(bytes.data() + names.sh_offset + section.sh_name, ".nv_fatbin") != 0) continue;
    for (size_t at = 0;
         at + 16 <= section.sh_size;) {  // a linked library holds one container per object
      if (field<uint32_t>(p, section.sh_offset + at) != kFatbinMagic) {
        at += 8;
        continue;
      }
      at += (read_container(p + section.sh_offset + at, texts) + 7) / 8 * 8;
    }
  }
  if (texts.empty()) throw PtxError("no PTX in " + path);
  return texts;
}

}  // namespace cudasim
