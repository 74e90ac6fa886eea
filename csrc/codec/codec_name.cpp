// Codec names: "raw", "int8", "int8:group=32" and back. The table below is all there is.
#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace pipecomm {
namespace {

struct Known {
  CodecId id;
  const char* name;
  std::vector<std::uint16_t> group_sizes;  // the first is the default; none for raw
};

const std::vector<Known>& known_codecs() {
  static const std::vector<Known> known = {
      {CodecId::raw, "raw", {}},
      {CodecId::int8, "int8", {64, 32, 128}},
      {CodecId::int4, "int4", {32}},
  };
  return known;
}

const Known* find(const std::string& name) {
  for (const Known& codec : known_codecs()) {
    if (name == codec.name) return &codec;
  }
  return nullptr;
}

bool has_group_size(const Known& codec, int group_size) {
  return std::find(codec.group_sizes.begin(), codec.group_sizes.end(), group_size) != codec.group_sizes.end();
}

std::string known_text() {
  std::string text;
  for (const Known& codec : known_codecs()) {
    text += (text.empty() ? "\"" : ", \"") + std::string(codec.name) + "\"";
    if (codec.group_sizes.size() < 2) continue;
    std::vector<std::uint16_t> sizes = codec.group_sizes;
    std::sort(sizes.begin(), sizes.end());
    std::string choices;
    for (const std::uint16_t size : sizes) choices += (choices.empty() ? "" : "|") + std::to_string(size);
    text += ", \"" + std::string(codec.name) + ":group=" + choices + "\"";
  }
  return text;
}

[[noreturn]] void throw_unknown(const std::string& text) {
  throw Error(ErrorKind::config, "expected a codec, one of " + known_text() + "; got \"" + text + "\"");
}

}  // namespace

CodecSpec parse_codec(const std::string& text) {
  static const std::string kGroupOption = ":group=";
  const std::size_t colon = std::min(text.find(':'), text.size());
  const Known* codec = find(text.substr(0, colon));
  if (codec == nullptr) throw_unknown(text);
  if (colon == text.size()) return {codec->id, codec->group_sizes.empty() ? std::uint16_t{0} : codec->group_sizes[0]};
  if (text.compare(colon, kGroupOption.size(), kGroupOption) != 0) throw_unknown(text);
  int group_size = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + colon + kGroupOption.size(), end, group_size);
  if (parsed.ec != std::errc() || parsed.ptr != end || !has_group_size(*codec, group_size)) throw_unknown(text);
  return {codec->id, static_cast<std::uint16_t>(group_size)};
}

std::string codec_to_string(const CodecSpec& spec) {
  for (const Known& codec : known_codecs()) {
    if (codec.id != spec.id) continue;
    const bool is_default = codec.group_sizes.empty() || codec.group_sizes[0] == spec.group_size;
    return is_default ? codec.name : std::string(codec.name) + ":group=" + std::to_string(spec.group_size);
  }
  return "codec " + std::to_string(static_cast<int>(spec.id));
}

bool is_known_codec(std::uint8_t id, std::uint16_t group_size) {
  for (const Known& codec : known_codecs()) {
    if (static_cast<std::uint8_t>(codec.id) != id) continue;
    return codec.group_sizes.empty() ? group_size == 0 : has_group_size(codec, group_size);
  }
  return false;
}

}  // namespace pipecomm
