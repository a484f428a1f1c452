// SPDX-License-Identifier: Apache-2.0
// Debian's libmicrohttpd can do TLS, by way of GnuTLS, of which there is no static build that is
// whole. We ask for none (mcp/http.c), so in the static program what it would call is this:
// nothing, and it fails, but for what is called when the program starts and ends. Programs that are
// linked dynamically have the library's own.

#define START_OR_END(name) \
	int name(void);    \
	int name(void)     \
	{                  \
		return 0;  \
	}
#define NO_TLS(name)       \
	int name(void);    \
	int name(void)     \
	{                  \
		return -1; \
	}

START_OR_END(gnutls_global_init)
START_OR_END(gnutls_global_deinit)
NO_TLS(gnutls_alpn_set_protocols)
NO_TLS(gnutls_bye)
NO_TLS(gnutls_certificate_allocate_credentials)
NO_TLS(gnutls_certificate_free_credentials)
NO_TLS(gnutls_certificate_server_set_request)
NO_TLS(gnutls_certificate_set_dh_params)
NO_TLS(gnutls_certificate_set_retrieve_function2)
NO_TLS(gnutls_certificate_set_retrieve_function3)
NO_TLS(gnutls_certificate_set_x509_key_mem)
NO_TLS(gnutls_certificate_set_x509_key_mem2)
NO_TLS(gnutls_certificate_set_x509_trust_mem)
NO_TLS(gnutls_cipher_get)
NO_TLS(gnutls_credentials_set)
NO_TLS(gnutls_deinit)
NO_TLS(gnutls_dh_params_deinit)
NO_TLS(gnutls_dh_params_import_pkcs3)
NO_TLS(gnutls_dh_params_init)
NO_TLS(gnutls_handshake)
NO_TLS(gnutls_init)
NO_TLS(gnutls_malloc)
NO_TLS(gnutls_priority_deinit)
NO_TLS(gnutls_priority_init)
NO_TLS(gnutls_priority_set)
NO_TLS(gnutls_protocol_get_version)
NO_TLS(gnutls_psk_allocate_server_credentials)
NO_TLS(gnutls_psk_free_server_credentials)
NO_TLS(gnutls_psk_set_server_credentials_function)
NO_TLS(gnutls_record_check_pending)
NO_TLS(gnutls_record_get_direction)
NO_TLS(gnutls_record_recv)
NO_TLS(gnutls_record_send)
NO_TLS(gnutls_session_get_ptr)
NO_TLS(gnutls_session_set_ptr)
NO_TLS(gnutls_strerror)
NO_TLS(gnutls_transport_set_int2)
