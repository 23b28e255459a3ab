#!/usr/bin/env bash
# `executor`: what Spark's scheduler wants of a pod that it starts, by the variables that it sets there.
# Anything else is a command, such as a driver's: python -m firn_spark.NAME.
set -euo pipefail

if [ "${1:-}" = executor ]; then
  mapfile -t options < <(env | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n | sed 's/[^=]*=//')
  exec "$JAVA_HOME/bin/java" "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CONF_DIR:-/opt/spark/conf}:$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
fi

# The first process of a container gets no signal that it does not handle, and Python handles no SIGTERM: it is passed on.
"$@" &
child=$!
trap 'kill -TERM "$child" 2> /dev/null || true' TERM
status=0
wait "$child" || status=$?
while kill -0 "$child" 2> /dev/null; do
  status=0
  wait "$child" || status=$?
done
exit "$status"
