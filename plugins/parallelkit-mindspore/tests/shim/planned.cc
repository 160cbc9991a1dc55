// Test only: makes MindSpore's parallel passes believe that they compile for a device that is not
// there, as any rank of any world. Nothing is moved and no peer is needed.
//
// The passes ask the device's communicator for this rank, for the number of ranks and for the size
// of each group that they plan; and they ask the context which device it is.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "include/utils/comm_manager.h"
#include "utils/ms_context.h"

namespace mindspore {
namespace {
class PlannedWorld : public CommManager {
 public:
  PlannedWorld(uint32_t rank, uint32_t size) : CommManager("hccl"), rank_(rank), size_(size) {}

  bool CreateGroupSync(const std::string &name,
                       const std::vector<unsigned int> &ranks) const override {
    groups_[name] = ranks;
    return true;
  }

  bool DestroyGroup(const std::string &name) const override {
    groups_.erase(name);
    return true;
  }

  bool GetRankID(const std::string &name, unsigned int *answer) const override {
    const auto found = groups_.find(name);
    if (found == groups_.end()) {
      *answer = rank_;
      return true;
    }
    const auto &ranks = found->second;
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    *answer = static_cast<unsigned int>(place - ranks.begin());
    return place != ranks.end();
  }

  bool GetRankSize(const std::string &name, unsigned int *answer) const override {
    const auto found = groups_.find(name);
    *answer = found == groups_.end() ? size_ : static_cast<unsigned int>(found->second.size());
    return true;
  }

  uint32_t GetRank() override { return rank_; }

 private:
  uint32_t rank_;
  uint32_t size_;
  mutable std::map<std::string, std::vector<unsigned int>> groups_;
};

std::shared_ptr<PlannedWorld> world;
}  // namespace
}  // namespace mindspore

// Be rank `rank` of `size` on `device`; 1 if that was taken.
extern "C" int planned_world(const char *device, uint32_t rank, uint32_t size) {
  mindspore::world = std::make_shared<mindspore::PlannedWorld>(rank, size);
  return mindspore::CommManager::Register(device, mindspore::world) ? 1 : 0;
}

// This rank's place in a group, and the group's size: what MindSpore's Python asks for operators.
extern "C" uint32_t planned_rank(const char *group) {
  unsigned int answer = 0;
  mindspore::world->GetRankID(group, &answer);
  return answer;
}

extern "C" uint32_t planned_size(const char *group) {
  unsigned int answer = 0;
  mindspore::world->GetRankSize(group, &answer);
  return answer;
}

// Say that the device is another one; what it was comes back. The setter checks for the device's
// libraries, so the text is changed in place.
extern "C" const char *pretend_device(const char *device) {
  static std::string before;
  const auto context = mindspore::MsContext::GetInstance();
  const auto &said = context->get_param<std::string>(mindspore::MS_CTX_DEVICE_TARGET);
  before = said;
  const_cast<std::string &>(said) = device;
  return before.c_str();
}
