"""An object store on loopback that speaks S3, and has the faults of stores when it is told to."""

import contextlib
import hashlib
import http.server
import threading
import urllib.parse
from xml.sax.saxutils import escape, unescape

DATE = "2026-01-01T00:00:00.000Z"


class ObjectServer:
    """S3 as far as a client of objects needs it, of one bucket.

    Attributes:
        objects: Content by key. Tests look into it, and change it.
        keeps_creates: Whether `If-None-Match` is obeyed; else it is ignored, and overwrites.
        page: How many keys a page of a list has.
        faults: For the next requests: "503", "409", "deny"; "lost": it is done, and not answered;
            "stalls": likewise, and the connection stays until `resumed` is set.
        asked: The requests, as "METHOD key".
    """

    def __init__(self, *, keeps_creates=True, page=1000):
        self.objects, self.uploads, self.faults, self.asked = {}, {}, [], []
        self.resumed = threading.Event()
        self.keeps_creates, self.page, self.lock = keeps_creates, page, threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self):
        """The variables by which clients find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def _handler(outer):  # noqa: N805
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                parts = urllib.parse.urlsplit(self.path)
                key = urllib.parse.unquote(parts.path).split("/", 2)[2:]
                query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
                body = self._body()
                with outer.lock:
                    key = key[0] if key else ""
                    outer.asked.append(f"{self.command} {key}")
                    fault = outer.faults.pop(0) if outer.faults else None
                    if fault in {"503", "409", "deny"}:
                        code = {"503": 503, "409": 409, "deny": 403}[fault]
                        reply = code, b"<Error><Code>Fault</Code></Error>", {}
                    else:
                        reply = outer.reply(self.command, key, query, body, self.headers)
                if fault == "stalls":
                    outer.resumed.wait(60)
                if fault in {"lost", "stalls"}:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._send(*reply)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

            def _body(self):
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                pieces = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)

            def _send(self, code, content, headers):
                with contextlib.suppress(BrokenPipeError, ConnectionError):
                    self.send_response(code)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(content)

            def log_message(self, *_):
                pass

        return Handler

    def reply(self, method, key, query, body, headers):
        """Status, content and headers of a request."""
        match method:
            case "PUT" if "partNumber" in query:
                self.uploads[query["uploadId"]][int(query["partNumber"])] = body
                return 200, b"", {"ETag": f'"{query["partNumber"]}"'}
            case "PUT":
                if headers.get("If-None-Match") and self.keeps_creates and key in self.objects:
                    return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
                self.objects[key] = body
                return 200, b"", {"ETag": tag(body)}
            case "POST" if "uploads" in query:
                upload = str(len(self.uploads))
                self.uploads[upload] = {}
                return 200, started(key, upload), {}
            case "POST" if "uploadId" in query:
                parts = self.uploads.pop(query["uploadId"])
                self.objects[key] = b"".join(parts[number] for number in sorted(parts))
                return 200, finished(key, tag(self.objects[key])), {}
            case "POST":
                keys = [each.partition("</Key>")[0] for each in body.decode().split("<Key>")[1:]]
                for each in keys:
                    self.objects.pop(unescape(each), None)
                rows = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys)
                return 200, f"<DeleteResult>{rows}</DeleteResult>".encode(), {}
            case "DELETE":
                self.uploads.pop(query.get("uploadId"), None)
                self.objects.pop(key, None)
                return 204, b"", {}
            case _ if not key:
                return 200, self.listed(query), {}
            case _ if key not in self.objects:
                return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
            case _:
                return ranged(self.objects[key], headers.get("Range"))

    def listed(self, query):
        after = query.get("continuation-token", "")
        keys = [k for k in sorted(self.objects) if k.startswith(query.get("prefix", ""))]
        keys = [key for key in keys if key > after]
        shown, more = keys[: self.page], len(keys) > self.page
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{DATE}</LastModified>"
            f"<ETag>{tag(self.objects[key])}</ETag><Size>{len(self.objects[key])}</Size></Contents>"
            for key in shown
        )
        token = (
            f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        )
        return (
            f'<?xml version="1.0"?><ListBucketResult>{rows}<IsTruncated>{str(more).lower()}'
            f"</IsTruncated>{token}</ListBucketResult>"
        ).encode()


def tag(content):
    return f'"{hashlib.md5(content).hexdigest()}"'


def started(key, upload):
    return (
        f'<?xml version="1.0"?><InitiateMultipartUploadResult><Bucket>b</Bucket>'
        f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
    ).encode()


def finished(key, etag):
    return (
        f'<?xml version="1.0"?><CompleteMultipartUploadResult><Location>l</Location>'
        f"<Bucket>b</Bucket><Key>{escape(key)}</Key><ETag>{escape(etag)}</ETag>"
        f"</CompleteMultipartUploadResult>"
    ).encode()


def ranged(content, asked):
    headers = {"ETag": tag(content), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    if not asked:
        return 200, content, headers
    first, _, last = asked.removeprefix("bytes=").partition("-")
    start, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
    if start >= len(content):
        return 416, b"<Error><Code>InvalidRange</Code></Error>", {}
    headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
    return 206, content[start : end + 1], headers
