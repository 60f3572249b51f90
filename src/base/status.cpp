#include "zinf/status.h"

#include <cerrno>
#include <cstring>

#include "src/base/check.h"
#include "src/base/strf.h"

namespace zinf {
namespace {

Code code_of(int errnum) {
  switch (errnum) {
    case EINVAL:
      return Code::kInvalid;
    case ENOENT:
    case ENOTDIR:
      return Code::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS:
      return Code::kPermission;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return Code::kNoSpace;
    case EOPNOTSUPP:
    case ENOSYS:
      return Code::kUnsupported;
    case ECANCELED:
      return Code::kCancelled;
    default:
      return Code::kIo;
  }
}

// "No space left on device (errno 28 ENOSPC)"
std::string errno_text(int errnum) {
  const char* name = strerrorname_np(errnum);
  const char* text = strerrordesc_np(errnum);
  return strf("%s (errno %d %s)", text ? text : "unknown error", errnum,
              name ? name : "?");
}

}  // namespace

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalid:
      return "invalid";
    case Code::kNotFound:
      return "not found";
    case Code::kPermission:
      return "permission";
    case Code::kNoSpace:
      return "no space";
    case Code::kOverBudget:
      return "over budget";
    case Code::kIo:
      return "io";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kCancelled:
      return "cancelled";
    case Code::kGone:
      return "gone";
  }
  return "?";
}

Status Status::make(Code code, int errnum, std::string text) {
  ZINF_CHECK(code != Code::kOk, "an error needs a code: %s", text.c_str());
  Status status;
  status.error_ =
      std::make_shared<const Error>(Error{code, errnum, std::move(text)});
  return status;
}

Status Status::error(Code code, std::string text) {
  return make(code, 0, std::move(text));
}

Status Status::system(std::string_view operation, std::string_view object,
                      int errnum) {
  return make(code_of(errnum), errnum,
              strf("%.*s %.*s: %s", len(operation), operation.data(),
                   len(object), object.data(), errno_text(errnum).c_str()));
}

Status Status::in(std::string_view context) const {
  std::string_view told = text();
  bool begins_so = told.starts_with(context) &&
                   told.substr(context.size()).starts_with(": ");
  if (ok() || begins_so) return *this;
  return make(code(), errnum(),
              strf("%.*s: %s", len(context), context.data(), text().c_str()));
}

Status Status::because(const Status& cause) const {
  if (ok() || cause.ok()) return *this;
  return make(code(), errnum(), text() + " (" + cause.text() + ")");
}

const std::string& Status::text() const {
  static const std::string ok_text = "ok";
  return error_ ? error_->text : ok_text;
}

Status Transfer::failed() const {
  std::string why = errnum != 0           ? errno_text(errnum)
                    : operation == "read" ? "end of file"
                                          : "short transfer";
  Code code = errnum != 0 ? code_of(errnum) : Code::kIo;
  return Status::make(
      code, errnum,
      strf("%.*s %.*s at offset %llu: wanted %llu bytes, got %llu: %s",
           len(operation), operation.data(), len(path), path.data(),
           static_cast<unsigned long long>(offset),
           static_cast<unsigned long long>(wanted),
           static_cast<unsigned long long>(got), why.c_str()));
}

namespace detail {
void result_has_no_value(const Status& status) {
  check_failed(__FILE__, __LINE__, "Result::ok()", "%s", status.text().c_str());
}
}  // namespace detail

}  // namespace zinf
