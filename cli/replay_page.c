// SPDX-License-Identifier: Apache-2.0
// The replay as a page; see the header. One thread.
#include "cli/replay_page.h"

#include <nettle/base64.h>
#include <nettle/sha2.h>
#include <stdlib.h>
#include <string.h>

// The records are data: JSON in a script element that is not run. The script makes text nodes of
// them and nothing else, and the policy lets no other script run, whatever is in them.
static const char style[] =
	"body{font:14px/1.4 system-ui,sans-serif;margin:0;background:#fff;color:#222}"
	"header{position:sticky;top:0;background:#f4f4f4;border-bottom:1px solid #ccc;padding:.6em "
	"1em}"
	"h1{font-size:1.1em;margin:0 0 .4em}"
	"#bar{display:flex;gap:.6em;align-items:center}#when{flex:1}"
	"#now{font-family:monospace;min-width:24ch}"
	"main{padding:1em}"
	"article{border-left:3px solid #7a9;margin:0 0 .8em;padding:.1em .8em}"
	"article.error,article.denied{border-color:#c44}article.cancelled{border-color:#c93}"
	"article.open{border-color:#48c}article.last{background:#fffbe6}"
	"article.later{display:none}"
	".head{font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere}"
	".time,.end{color:#666}"
	"pre{margin:.3em "
	"0;padding:.4em;background:#f7f7f7;white-space:pre-wrap;overflow-wrap:anywhere}"
	"pre.err{background:#fdf0f0}"
	"@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}"
	"header{background:#222;border-color:#444}pre{background:#222}pre.err{background:#311}"
	"article.last{background:#2a2818}.time,.end{color:#999}}";

static const char script[] =
	"'use strict';\n"
	"const records=JSON.parse(document.getElementById('records').textContent);\n"
	"const el=(id)=>document.getElementById(id);\n"
	"const add=(to,tag,kind,text)=>{const "
	"e=document.createElement(tag);if(kind)e.className=kind;\n"
	"  e.textContent=text;to.appendChild(e);return e};\n"
	"const say=(v)=>typeof v==='string'?v:JSON.stringify(v);\n"
	"const word=(w)=>/^[\\w./:=@%+,-]+$/.test(w)?w:JSON.stringify(w);\n"
	"const calls=new Map(),list=[];\n"
	"for(const r of records){\n"
	"  const key=r.session+' '+r.call,at=Date.parse(r.time);\n"
	"  if(r.event==='call'){\n"
	"    const c={begin:at,end:Infinity,call:r,result:null};calls.set(key,c);list.push(c)}\n"
	"  else{let c=calls.get(key);\n"
	"    if(!c){c={begin:at,end:at,call:r,result:null};list.push(c)}\n"
	"    c.end=at;c.result=r}\n"
	"}\n"
	"for(const c of list){\n"
	"  const a=c.article=add(el('story'),'article','','');\n"
	"  const args=c.call.arguments||{},head=add(a,'div','head','');\n"
	"  add(head,'span','time',c.call.time+'  '+String(c.call.session).slice(0,8)+' "
	"#'+c.call.call+'  ');\n"
	"  add(head,'b','',c.call.tool+' ');\n"
	"  add(head,'span','',Array.isArray(args.argv)?args.argv.map((w)=>word(say(w))).join(' ')\n"
	"    :Object.entries(args).map(([k,v])=>k+'='+say(v)).join('  '));\n"
	"  const r=c.result;c.tail=add(a,'div','','');\n"
	"  if(!r)continue;\n"
	"  if(r.stdout)add(c.tail,'pre','',say(r.stdout));\n"
	"  if(r.stderr)add(c.tail,'pre','err',say(r.stderr));\n"
	"  if(r.files)add(c.tail,'pre','',r.files.map(say).join('\\n'));\n"
	"  if(r.error)add(c.tail,'pre','err',say(r.error));\n"
	"  if(Array.isArray(r.files))add(c.tail,'pre','',r.files.map(say).join('\\n'));\n"
	"  add(c.tail,'div','end',r.outcome+('exit_code' in r?', exit '+r.exit_code:'')\n"
	"    +', '+r.duration_ms+' ms, '+r.result_bytes+' bytes');\n"
	"}\n"
	"const times=[...new Set(list.flatMap((c)=>[c.begin,c.end]).filter(Number.isFinite))]\n"
	"  .sort((a,b)=>a-b);\n"
	"const bar=el('when');bar.max=Math.max(times.length-1,0);bar.value=bar.max;\n"
	"const show=()=>{\n"
	"  const now=times[bar.value];let last=null;\n"
	"  el('now').textContent=times.length?new Date(now).toISOString():'nothing was done';\n"
	"  for(const c of list){\n"
	"    const over=c.end<=now,begun=c.begin<=now;\n"
	"    c.article.className=!begun?'later':over?String(c.result.outcome):'open';\n"
	"    c.tail.hidden=!over;\n"
	"    if(c.begin===now||c.end===now)last=c.article;\n"
	"  }\n"
	"  if(last){last.classList.add('last');last.scrollIntoView({block:'nearest'})}\n"
	"};\n"
	"bar.oninput=show;show();\n"
	"let timer=0;\n"
	"const stop=()=>{clearInterval(timer);timer=0;el('play').textContent='Play'};\n"
	"el('play').onclick=()=>{\n"
	"  if(timer){stop();return}\n"
	"  if(+bar.value>=+bar.max)bar.value=0;\n"
	"  el('play').textContent='Stop';show();\n"
	"  "
	"timer=setInterval(()=>{if(+bar.value>=+bar.max){stop();return}bar.value=+bar.value+1;show("
	")},400);\n"
	"};\n";

static void put_hash(FILE *file, const char *text)
{
	uint8_t digest[SHA256_DIGEST_SIZE];
	char code[BASE64_ENCODE_RAW_LENGTH(SHA256_DIGEST_SIZE) + 1] = "";
	struct sha256_ctx sha;

	sha256_init(&sha);
	sha256_update(&sha, strlen(text), (const uint8_t *)text);
	sha256_digest(&sha, sizeof(digest), digest);
	base64_encode_raw(code, sizeof(digest), digest);
	fprintf(file, "'sha256-%s'", code);
}

static void put_text(FILE *file, const char *text)
{
	for (; *text; text++) {
		if (strchr("<>&\"'", *text))
			fprintf(file, "&#%d;", *text);
		else
			fputc(*text, file);
	}
}

void replay_page_begin(struct replay_page *page, const char *machine)
{
	FILE *f = page->file;

	fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
	      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; base-uri "
	      "'none'; form-action 'none'; style-src ",
		f);
	put_hash(f, style);
	fputs("; script-src ", f);
	put_hash(f, script);
	fputs("\">\n<meta name=\"referrer\" content=\"no-referrer\">\n<title>", f);
	put_text(f, machine);
	fprintf(f,
		"</title>\n<style>%s</style>\n</head>\n<body>\n<header>\n<h1>What agents did with ",
		style);
	put_text(f, machine);
	fputs("</h1>\n<div id=\"bar\"><button id=\"play\">Play</button>"
	      "<input id=\"when\" type=\"range\" min=\"0\" max=\"0\" value=\"0\" "
	      "aria-label=\"time\">"
	      "<span id=\"now\"></span></div>\n</header>\n<main id=\"story\"></main>\n"
	      "<script type=\"application/json\" id=\"records\">[",
		f);
}

void replay_page_add(struct replay_page *page, const json_t *record)
{
	// ASCII, and in it no character that HTML knows: they are in strings alone.
	char *text = json_dumps(record, JSON_COMPACT | JSON_ENSURE_ASCII);

	if (!text)
		return;
	fputs(page->any ? ",\n" : "\n", page->file);
	page->any = true;
	for (const char *at = text; *at; at++) {
		if (strchr("<>&", *at))
			fprintf(page->file, "\\u%04x", *at);
		else
			fputc(*at, page->file);
	}
	free(text);
}

void replay_page_end(struct replay_page *page)
{
	fprintf(page->file, "\n]</script>\n<script>%s</script>\n</body>\n</html>\n", script);
}
