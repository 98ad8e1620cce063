"""An etcd with users, of whom one may read."""

import grpc
from pyetcd import etcdrpc as rpc


def limited(server, prefix, password_file, *, writes=False):
    """Switch users on in an etcd; the environment of one who may read, or write, what begins so.

    Another one, "nobody", has the same password and may do nothing.
    """
    password_file.write_text("secret\n")
    with grpc.insecure_channel(server.host) as channel:
        auth = rpc.AuthStub(channel)
        for name in ("root", "reads", "nobody"):
            auth.RoleAdd(rpc.AuthRoleAddRequest(name=name))
            auth.UserAdd(rpc.AuthUserAddRequest(name=name, password="secret"))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=name))
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        kind = 2 if writes else 0
        may = rpc.Permission(permType=kind, key=prefix.encode(), range_end=end.encode())
        auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="reads", perm=may))
        auth.AuthEnable(rpc.AuthEnableRequest())
    return {"TORCH_ROS_ETCD_USER": "reads", "TORCH_ROS_ETCD_PASSWORD_FILE": str(password_file)}
