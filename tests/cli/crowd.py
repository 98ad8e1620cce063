"""The records that many replicas would leave in a store, written by one process."""

from torch_ros.protocol import records
from torch_ros.protocol.keys import Keys, instance
from torch_ros.protocol.schema import SCHEMA
from torch_ros.release import RELEASE
from torch_ros.store.txn import Delete, Put, Txn, one

NONCE, RUN = "0badcafe", "run-1f20aa01"
LAYOUT = f"ab/312/{15 << 30}"
OPS_MAX = 100


class Crowd:
    """Replicas of `model`, by name."""

    def __init__(self, kv, model):
        self.kv, self.keys, self.ops, self.places = kv, Keys(model), [], {}
        self._put(self.keys.schema(), records.SchemaRecord(SCHEMA, RELEASE))
        self._put(self.keys.run(RUN), records.RunRecord("trainer", 1))

    def join(self, name, datacenter="default", **more):
        self.places[name] = datacenter
        group = records.GroupRecord(NONCE, 8, RUN, is_complete=True, datacenter=datacenter, **more)
        self._put(self.keys.group(name), group)

    def publish(self, name, version):
        self._put(self.keys.version(RUN, version), records.VersionRecord(f"u{version}", LAYOUT))
        self.hold(name, version, is_original=True)

    def read(self, name, source, version):
        self.hold(name, version, "filling", is_relay=True)
        reader = self.keys.reader_group(RUN, version, *map(inst, (source, name)))
        self._put(reader, records.Reader(1))

    def arrive(self, name, source, version):
        self.ops.append(
            Delete(one(self.keys.reader_group(RUN, version, *map(inst, (source, name)))))
        )
        self.hold(name, version)

    def hold(self, name, version, state="full", **more):
        place = self.places[name]
        self._put(
            self._holding(name, version), records.Holding(f"u{version}", 1, state, 8, place, **more)
        )

    def drop(self, name, version):
        self.ops.append(Delete(one(self._holding(name, version))))

    def commit(self):
        for start in range(0, len(self.ops), OPS_MAX):
            ops = tuple(self.ops[start : start + OPS_MAX])
            self.kv.commit(Txn((), ops), timeout_s=10)
        self.ops = []

    def _holding(self, name, version):
        return self.keys.holding(RUN, version, self.places[name], inst(name))

    def _put(self, key, record):
        self.ops.append(Put(key, record.encode()))


def inst(name):
    return instance(name, NONCE)
