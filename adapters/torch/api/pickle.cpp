#include "adapters/torch/api/pickle.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <caffe2/serialize/in_memory_adapter.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

namespace zinf {
namespace {

using c10::IValue;

Result<IValue> plain_list(c10::ArrayRef<IValue> values,
                          const std::string& name) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const IValue& value : values) {
    ZINF_ASSIGN(
        IValue part,
        plain_value(value, name + "[" + std::to_string(list.size()) + "]"));
    list.push_back(part);
  }
  return IValue(list);
}

Result<IValue> plain_tuple(c10::ArrayRef<IValue> values,
                           const std::string& name) {
  std::vector<IValue> parts;
  for (const IValue& value : values) {
    ZINF_ASSIGN(
        IValue part,
        plain_value(value, name + "[" + std::to_string(parts.size()) + "]"));
    parts.push_back(part);
  }
  return IValue(c10::ivalue::Tuple::create(std::move(parts)));
}

Result<IValue> plain_dict(const c10::impl::GenericDict& values,
                          const std::string& name) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& item : values) {
    std::string key = item.key().isString() ? item.key().toStringRef() : "...";
    ZINF_ASSIGN(IValue part,
                plain_value(item.value(), name + "[\"" + key + "\"]"));
    dict.insert(item.key(), part);
  }
  return IValue(dict);
}

Status failed(const std::exception& error) {
  std::string text = error.what();
  return Status::error(Code::kUnsupported, text.substr(0, text.find('\n')));
}

// Python's LONG1 has as many bytes as its integer needs; torch's C++ reader
// takes eight only.
class LongWidener {
 public:
  explicit LongWidener(const std::string& pickle) : in_(pickle) {}

  Result<std::string> run() {
    while (position_ < in_.size()) {
      char code = in_[position_];
      if (code == '\x8a') {
        ZINF_TRY(widen());
        continue;
      }
      ZINF_ASSIGN(std::size_t bytes, operand_bytes(code));
      copy(1 + bytes);
      if (code == '.') return std::move(out_);
    }
    return damaged();
  }

 private:
  static Status damaged() {
    return Status::error(Code::kCorrupt, "a pickle ends before its end");
  }

  Status widen() {
    if (position_ + 2 > in_.size()) return damaged();
    auto bytes = static_cast<unsigned char>(in_[position_ + 1]);
    if (position_ + 2 + bytes > in_.size()) return damaged();
    if (bytes > sizeof(std::int64_t)) {
      return Status::error(Code::kUnsupported,
                           "an integer of more than 64 bits");
    }
    const char* digits = in_.data() + position_ + 2;
    bool negative = bytes > 0 && (digits[bytes - 1] & 0x80) != 0;
    std::string wide(sizeof(std::int64_t), negative ? '\xff' : '\0');
    std::copy(digits, digits + bytes, wide.begin());
    out_ += "\x8a\x08";
    out_ += wide;
    position_ += 2 + bytes;
    return {};
  }

  // That follow a code of pickle's protocol 2.
  Result<std::size_t> operand_bytes(char code) const {
    auto is_one_of = [&](std::string_view codes) {
      return codes.find(code) != std::string_view::npos;
    };
    if (is_one_of("}](.NaetbusR0Q)l\x85\x86\x87\x88\x89")) return 0;
    if (is_one_of("\x80Kqh")) return 1;
    if (code == 'M') return 2;
    if (is_one_of("Jrj")) return 4;
    if (code == 'G') return 8;
    if (code == 'X') return text_bytes();
    if (code == 'c') return name_bytes();
    return Status::error(Code::kUnsupported,
                         "a pickle with a code that C++ does not know");
  }

  Result<std::size_t> text_bytes() const {
    std::uint32_t length = 0;
    if (position_ + 1 + sizeof(length) > in_.size()) return damaged();
    std::memcpy(&length, in_.data() + position_ + 1, sizeof(length));
    return sizeof(length) + length;
  }

  // Of a module and a name, each with a newline.
  Result<std::size_t> name_bytes() const {
    std::size_t first = in_.find('\n', position_);
    if (first == std::string::npos) return damaged();
    std::size_t second = in_.find('\n', first + 1);
    if (second == std::string::npos) return damaged();
    return second - position_;
  }

  void copy(std::size_t bytes) {
    bytes = std::min(bytes, in_.size() - position_);
    out_.append(in_, position_, bytes);
    position_ += bytes;
  }

  const std::string& in_;
  std::size_t position_ = 0;
  std::string out_;
};

}  // namespace

Result<IValue> plain_value(const IValue& value, const std::string& name) {
  if (value.isTuple()) {
    return plain_tuple(value.toTupleRef().elements(), name);
  }
  if (value.isList()) return plain_list(value.toList().vec(), name);
  if (value.isGenericDict()) return plain_dict(value.toGenericDict(), name);
  if (value.isTensor() && value.toTensor().defined()) {
    // A copy: views would take the whole of their storage with them.
    return IValue(value.toTensor().detach().cpu().clone());
  }
  if (value.isNone() || value.isBool() || value.isInt() || value.isDouble() ||
      value.isString()) {
    return value;
  }
  return Status::error(
      Code::kInvalid,
      name + " is of type " + value.tagKind() +
          ", which cannot be stored: extra may hold tensors, numbers, texts, "
          "None, and lists, tuples and dictionaries of these");
}

Result<std::string> pickle_value(const IValue& value) {
  try {
    std::string pickle;
    torch::jit::Pickler pickler(
        [&](const char* data, std::size_t bytes) {
          pickle.append(data, bytes);
        },
        nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
    pickler.protocol();
    pickler.pushIValue(value);
    pickler.stop();

    std::string out;
    caffe2::serialize::PyTorchStreamWriter writer(
        [&](const void* data, std::size_t bytes) {
          out.append(static_cast<const char*>(data), bytes);
          return bytes;
        });
    std::size_t index = 0;
    for (const at::Tensor& tensor : pickler.tensorData()) {
      writer.writeRecord("data/" + std::to_string(index++),
                         tensor.storage().data(), tensor.storage().nbytes());
    }
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeEndOfFile();
    return out;
  } catch (const std::exception& error) {
    return failed(error);
  }
}

Result<IValue> unpickle_value(const std::string& data) {
  try {
    caffe2::serialize::PyTorchStreamReader reader(
        std::make_shared<caffe2::serialize::MemoryReadAdapter>(
            data.data(), static_cast<off_t>(data.size())));
    auto [bytes, size] = reader.getRecord("data.pkl");
    std::string record(static_cast<const char*>(bytes.get()), size);
    ZINF_ASSIGN(std::string pickle, LongWidener(record).run());
    std::size_t position = 0;
    torch::jit::Unpickler unpickler(
        [&](char* buffer, std::size_t wanted) {
          std::size_t count = std::min(wanted, pickle.size() - position);
          std::memcpy(buffer, pickle.data() + position, count);
          position += count;
          return count;
        },
        nullptr, nullptr,
        [&](const std::string& name) {
          return std::get<0>(reader.getRecord("data/" + name));
        },
        std::nullopt);
    return unpickler.parse_ivalue();
  } catch (const std::exception& error) {
    return failed(error);
  }
}

}  // namespace zinf
