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
            "stalls": likewise, and the connection stays until `resumed` is set; "truncated": half
            of the content is sent; "dribbles": a byte at a time is, until `resumed` is set;
            "200 error": an error of S3 that comes after it has said that all is well.
        is_away: Each connection is closed.
        asked: The requests, as "METHOD key".
        uploads: Parts by number, by upload. A test that clears it loses them.
    """

    def __init__(self, *, keeps_creates=True, page=1000):
        self.objects, self.uploads, self.faults, self.asked = {}, {}, [], []
        self.resumed, self.is_away = threading.Event(), False
        self.keeps_creates, self.page, self.lock = keeps_creates, page, threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

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
                if outer.is_away:
                    return self._hang_up()
                with outer.lock:
                    key = key[0] if key else ""
                    outer.asked.append(f"{self.command} {key}")
                    fault = outer.faults.pop(0) if outer.faults else None
                    if fault in {"503", "409", "deny"}:
                        code = {"503": 503, "409": 409, "deny": 403}[fault]
                        reply = code, b"<Error><Code>Fault</Code></Error>", {}
                    elif fault == "200 error":
                        reply = 200, b"<Error><Code>InternalError</Code></Error>", {}
                    else:
                        reply = outer.reply(self.command, key, query, body, self.headers)
                if fault == "stalls":
                    outer.resumed.wait(60)
                if fault in {"lost", "stalls"}:
                    return self._hang_up()
                return self._send(*reply, fault)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

            def _hang_up(self):
                self.close_connection = True
                self.connection.close()

            def _body(self):
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                pieces = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)

            def _send(self, code, content, headers, fault):
                with contextlib.suppress(BrokenPipeError, ConnectionError):
                    self.send_response(code)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    if fault == "truncated":
                        content = content[: len(content) // 2]
                        self.close_connection = True
                    while fault == "dribbles" and content and not outer.resumed.wait(0.05):
                        self.wfile.write(content[:1])
                        content = content[1:]
                    if self.command != "HEAD":
                        self.wfile.write(content)

            def log_message(self, *_):
                pass

        return Handler

    def reply(self, method, key, query, body, headers):
        """Status, content and headers of a request."""
        match method:
            case "PUT" | "POST" if query.get("uploadId", "") not in {"", *self.uploads}:
                return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
            case "PUT" if "partNumber" in query:
                self.uploads[query["uploadId"]][int(query["partNumber"])] = body
                return 200, b"", {"ETag": f'"{query["partNumber"]}"'}
            case "PUT":
                if headers.get("If-None-Match") and self.keeps_creates and key in self.objects:
                    return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
                self.objects[key] = body
                return 200, b"", {"ETag": tag(body)}
            case "POST" if "uploads" in query:
                upload = str(len(self.asked))
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
                of = self.uploads if "uploadId" in query else self.objects
                of.pop(query.get("uploadId", key), None)
                return 204, b"", {}
            case _ if not key:
                return 200, self.listed(query), {}
            case _ if key not in self.objects:
                return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
            case _:
                return ranged(self.objects[key], headers.get("Range"))

    def listed(self, query):
        after = query.get("continuation-token", query.get("start-after", ""))
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
