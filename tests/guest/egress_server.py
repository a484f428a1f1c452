# SPDX-License-Identifier: Apache-2.0
# What a guest reaches through its proxy: on 127.0.0.1, prints the port. Answers GET with its path, or
# with a redirect for /to/URL; what does not begin with a method comes back as it is. And
# [CERT KEY LOG]: on 127.7.7.7:443 over TLS, answers each request with itself, and keeps it in LOG.
import socket
import ssl
import sys
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


def serve_tls(conn, context, log):
    try:
        with context.wrap_socket(conn, server_side=True) as tls:
            data = tls.recv(65536)
            with open(log, "ab") as file:
                file.write(data)
            tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    except OSError:
        pass


def listen_tls(cert, key, log):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    tls = socket.create_server(("127.7.7.7", 443))
    while True:
        threading.Thread(target=serve_tls, args=(tls.accept()[0], context, log), daemon=True).start()


if len(sys.argv) > 1:
    threading.Thread(target=listen_tls, args=sys.argv[1:], daemon=True).start()
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
