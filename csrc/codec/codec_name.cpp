// Codec names, such as "int8:group=32,hadamard=64", and back; and the two fields that name a codec on the wire. The
// table below is all there is.
#include "codec/codec_name.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "codec/hadamard.h"

namespace pipecomm {
namespace {

constexpr std::uint8_t kTransformBit = 128;
// Two bits of the wire id say how many spikes: none, 1, 2, 4.
constexpr int kSpikesShift = 5;
constexpr std::uint8_t kSpikes[] = {0, 1, 2, 4};

struct Known {
  CodecId id;
  const char* name;
  std::vector<std::uint16_t> group_sizes;  // the first is the default; none for raw
  bool has_noise;                          // rounding=stochastic
};

const std::vector<Known>& known_codecs() {
  static const std::vector<Known> known = {
      {CodecId::raw, "raw", {}, false},
      {CodecId::int8, "int8", {64, 32, 128}, true},
      {CodecId::int4, "int4", {32}, true},
      {CodecId::int4_symmetric, "int4-symmetric", {64}, true},
      {CodecId::fp8, "fp8", {64, 32, 128}, false},
      {CodecId::nf4, "nf4", {64}, false},
  };
  return known;
}

template <typename Predicate>
const Known* find(Predicate predicate) {
  const auto& known = known_codecs();
  const auto found = std::find_if(known.begin(), known.end(), predicate);
  return found == known.end() ? nullptr : &*found;
}

bool has_group_size(const Known& codec, std::uint64_t group_size) {
  return std::find(codec.group_sizes.begin(), codec.group_sizes.end(), group_size) != codec.group_sizes.end();
}

std::string group_choices(const Known& codec) {
  std::vector<std::uint16_t> sizes = codec.group_sizes;
  std::sort(sizes.begin(), sizes.end());
  std::string choices;
  for (const std::uint16_t size : sizes) choices += (choices.empty() ? "" : "|") + std::to_string(size);
  return choices;
}

std::string known_text() {
  std::string text;
  for (const Known& codec : known_codecs()) {
    text += (text.empty() ? "\"" : ", \"") + std::string(codec.name) + "\"";
    if (codec.group_sizes.size() > 1)
      text += ", \"" + std::string(codec.name) + ":group=" + group_choices(codec) + "\"";
  }
  return text +
         "; quantizing codecs take spikes=1|2|4 or, in groups of up to 64, hadamard=64, not both; integer ones "
         "rounding=stochastic and with it seed=0..2^64-1, separated by commas: "
         "\"int4:hadamard=64,rounding=stochastic\"";
}

[[noreturn]] void throw_unknown(const std::string& text) {
  throw Error(ErrorKind::config, "expected a codec, one of " + known_text() + "; got \"" + text + "\"");
}

bool parse_number(std::string_view text, std::uint64_t& number) {
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  return parsed.ec == std::errc() && parsed.ptr == text.data() + text.size();
}

// Options still to come; each may be given once.
struct Options {
  bool group = true;
  bool hadamard = true;
  bool spikes = true;
  bool rounding = true;
  bool seed = true;
};

bool take(bool& is_left) { return std::exchange(is_left, false); }

// False where the option is none, comes twice, or has a value that the codec does not take.
bool apply_option(const Known& codec, std::string_view option, Options& left, CodecSpec& spec) {
  const std::size_t equals = std::min(option.find('='), option.size());
  const std::string_view key = option.substr(0, equals);
  const std::string_view value = option.substr(std::min(equals + 1, option.size()));
  std::uint64_t number = 0;
  if (key == "rounding") {
    spec.rounding = value == "stochastic" ? Rounding::stochastic : Rounding::nearest;
    return take(left.rounding) && (value == "nearest" || (value == "stochastic" && codec.has_noise));
  }
  if (!parse_number(value, number)) return false;
  if (key == "group") {
    spec.group_size = static_cast<std::uint16_t>(number);
    return take(left.group) && has_group_size(codec, number);
  }
  if (key == "hadamard") {
    spec.has_transform = true;
    return take(left.hadamard) && number == kTransformWidth;
  }
  if (key == "spikes") {
    spec.num_spikes = static_cast<std::uint8_t>(number);
    return take(left.spikes) && (number == 1 || number == 2 || number == 4);
  }
  spec.seed = number;
  return key == "seed" && take(left.seed);
}

bool is_consistent(const CodecSpec& spec, const Options& left) {
  if (spec.has_transform && (spec.group_size == 0 || spec.group_size > kTransformWidth)) return false;
  if (spec.num_spikes != 0 && (spec.group_size == 0 || spec.has_transform)) return false;
  return left.seed || spec.rounding == Rounding::stochastic;
}

}  // namespace

CodecSpec parse_codec(const std::string& text) {
  const std::string_view all = text;
  const std::size_t colon = std::min(all.find(':'), all.size());
  const Known* codec = find([&](const Known& known) { return all.substr(0, colon) == known.name; });
  if (codec == nullptr) throw_unknown(text);
  CodecSpec spec;
  spec.id = codec->id;
  if (!codec->group_sizes.empty()) spec.group_size = codec->group_sizes.front();
  Options left;
  for (std::size_t begin = colon; begin < all.size();) {
    const std::size_t end = std::min(all.find(',', begin + 1), all.size());
    if (!apply_option(*codec, all.substr(begin + 1, end - begin - 1), left, spec)) throw_unknown(text);
    begin = end;
  }
  if (!is_consistent(spec, left)) throw_unknown(text);
  return spec;
}

std::string codec_to_string(const CodecSpec& spec) {
  const Known* codec = find([&](const Known& known) { return known.id == spec.id; });
  if (codec == nullptr) return "codec " + std::to_string(static_cast<int>(spec.id));
  std::string options;
  const bool is_default = codec->group_sizes.empty() || codec->group_sizes.front() == spec.group_size;
  if (!is_default) options += ",group=" + std::to_string(spec.group_size);
  if (spec.has_transform) options += ",hadamard=" + std::to_string(kTransformWidth);
  if (spec.num_spikes != 0) options += ",spikes=" + std::to_string(spec.num_spikes);
  if (spec.rounding == Rounding::stochastic) options += ",rounding=stochastic";
  if (spec.seed != 0) options += ",seed=" + std::to_string(spec.seed);
  if (!options.empty()) options.front() = ':';
  return codec->name + options;
}

std::uint8_t wire_id(const CodecSpec& spec) {
  const auto spikes = std::find(std::begin(kSpikes), std::end(kSpikes), spec.num_spikes) - std::begin(kSpikes);
  return static_cast<std::uint8_t>(static_cast<int>(spec.id) | static_cast<int>(spikes) << kSpikesShift |
                                   (spec.has_transform ? kTransformBit : 0));
}

std::optional<CodecSpec> codec_from_wire(std::uint8_t id, std::uint16_t group_size) {
  CodecSpec spec;
  spec.id = static_cast<CodecId>(id & ((1 << kSpikesShift) - 1));
  spec.num_spikes = kSpikes[id >> kSpikesShift & 3];
  spec.has_transform = (id & kTransformBit) != 0;
  spec.group_size = group_size;
  const Known* codec = find([&](const Known& known) { return known.id == spec.id; });
  if (codec == nullptr || !is_consistent(spec, {})) return std::nullopt;
  const bool has_size = codec->group_sizes.empty() ? group_size == 0 : has_group_size(*codec, group_size);
  return has_size ? std::optional(spec) : std::nullopt;
}

}  // namespace pipecomm
