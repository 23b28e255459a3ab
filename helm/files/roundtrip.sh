# Variables: TOPIC, TRIES (seconds to wait for it), and those of the firn client.
tries=0
until firn --timeout 5s topics describe "$TOPIC" > /dev/null 2> /tmp/why; do
  tries=$((tries + 1))
  if [ "$tries" -ge "$TRIES" ]; then echo "topic $TOPIC did not get ready: $(cat /tmp/why)"; exit 1; fi
  sleep 1
done
rounds=100
for round in $(seq "$rounds"); do
  for key in 0 1 2 3 4 5 6 7 8 9; do printf 'key-%s\tround-%s\n' "$key" "$round"; done
done > /tmp/sent
firn produce "$TOPIC" < /tmp/sent
firn compact "$TOPIC" --force --wait
firn consume "$TOPIC" --format tsv | sort > /tmp/found
tail -n 10 /tmp/sent | sort > /tmp/wanted
if ! cmp /tmp/wanted /tmp/found; then echo "wanted:"; cat /tmp/wanted; echo "found:"; cat /tmp/found; exit 1; fi
echo "1,000 records of 10 keys written, compacted, and the last of each read back"
