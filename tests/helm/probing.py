"""Asks the probes of a pod from inside it, a line for each answer: `probing.py SECONDS {"NAME": {"httpGet": {}}}`."""

import http.client
import json
import socket
import ssl
import sys
import time
from typing import Any

TIMEOUT_S = 3.0


def passes(probe: dict[str, Any]) -> bool:
    try:
        if "httpGet" in probe:
            return _http(probe["httpGet"])
        return _grpc(probe["grpc"]) if "grpc" in probe else _connects(probe["tcpSocket"])
    except Exception:  # whatever it is, the probe has failed
        return False


def _http(probe: dict[str, Any]) -> bool:
    if probe.get("scheme") == "HTTPS":  # as the kubelet: it looks at no certificate
        unverified = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            probe["host"], probe["port"], timeout=TIMEOUT_S, context=unverified
        )
    else:
        connection = http.client.HTTPConnection(probe["host"], probe["port"], timeout=TIMEOUT_S)
    connection.request("GET", probe["path"])
    return connection.getresponse().status < 400


def _connects(probe: dict[str, Any]) -> bool:
    with socket.create_connection((probe["host"], probe["port"]), timeout=TIMEOUT_S):
        return True


def _grpc(probe: dict[str, Any]) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"{probe['host']}:{probe['port']}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        asked = health_pb2.HealthCheckRequest(service=probe.get("service", ""))
        answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    probes = json.loads(sys.argv[2])
    while True:
        for name, probe in probes.items():
            print(json.dumps([name, passes(probe)]), flush=True)
        time.sleep(float(sys.argv[1]))
