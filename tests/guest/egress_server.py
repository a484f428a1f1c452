# SPDX-License-Identifier: Apache-2.0
# What a guest reaches through its proxy: on 127.0.0.1, prints the port. Answers GET with its path, or
# with a redirect for /to/URL; what does not begin with a method comes back as it is.
import socket
import threading


def serve(conn):
    with conn:
        data = conn.recv(65536)
        if data.startswith(b"GET "):
            while b"\r\n\r\n" not in data:
                data += conn.recv(65536) or b"\r\n\r\n"
            path = data.split(b" ")[1]
            if path.startswith(b"/to/"):
                conn.sendall(b"HTTP/1.1 302 Found\r\nLocation: " + path[4:] + b"\r\nContent-Length: 0\r\n\r\n")
            else:
                body = b"you asked for " + path + b"\n"
                conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        while data:
            conn.sendall(data)
            data = conn.recv(65536)


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
